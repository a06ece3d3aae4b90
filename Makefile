# The README's two commands are `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard csrc/*)

.PHONY: demo test lint format clean

demo: .venv/.installed
	$(BIN)/attngrad demo

test: .venv/.installed-test lint
	$(BIN)/python -m pytest -n auto

lint: .venv/.installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/.installed-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attngrad needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv .venv

.venv/.installed: .venv/bin/python $(BUILD_INPUTS)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/.installed-test: .venv/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@
