# Each target does the set-up it needs: `make chat` or `make test` on a bare machine is enough.
.DEFAULT_GOAL := help
.PHONY: help setup dev chat test lint bench load shaders clean

PY := .venv/bin/python
ARGS ?=

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: ## system packages, .venv, kp, the project (nothing is done twice)
	@bash tools/setup.sh

dev: ## the same, and what tests and checks need
	@bash tools/setup.sh --dev

chat: setup ## talk to a model (ARGS="--model DIR" for another one)
	@.venv/bin/mimo-vk chat $(ARGS)

test: dev ## run the tests (ARGS="tests/test_cli.py -q" for some)
	@$(PY) -m pytest $(ARGS)

lint: dev ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: setup ## the speed table (ARGS="--model DIR" for another checkpoint)
	@.venv/bin/mimo-vk bench $(ARGS)

load: setup ## 16 clients against a server for two minutes (ARGS="--seconds 30" for less)
	@$(PY) -m tools.load_test $(ARGS)

shaders: setup ## compile shaders/*.comp
	@$(PY) tools/build_shaders.py

clean: ## remove what set-up and builds made (not the cached kp wheel)
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
