"""The parts of make_checkpoint.py: geometries, tensor layout, contents, files, tokenizer."""
