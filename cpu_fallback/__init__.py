"""The operations of ``mimo_vk/ops.py`` on the CPU: a numpy reference, and numba twins with the same bits."""
