# Everything runs in a virtual environment of its own, .venv, which each target sets up if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo check test format bench clean

help:
	@echo "make setup   install Outpace and what its development needs into $(VENV)"
	@echo "make demo    the model in the box, plain and with every drafter: a minute or two"
	@echo "make test    run the tests ($(WORKERS) processes; WORKERS=n for another number)"
	@echo "make check   ruff, mypy --strict, import-linter"
	@echo "make bench   plain decoding against Transformers' generate"

setup: $(STAMP)

# torch first and pinned: an unpinned torch may pull gigabytes of CUDA packages onto a machine without a GPU.
$(STAMP): pyproject.toml constraints.txt
	@echo ">>> creating $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo ">>> installing torch (large; a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@echo ">>> installing Outpace with its development tools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@
	@echo ">>> ready"

demo: setup
	@$(BIN)/outpace demo

check: setup
	@echo ">>> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo ">>> mypy"
	@$(BIN)/mypy
	@echo ">>> import-linter"
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

test: setup
	@echo ">>> pytest in $(WORKERS) processes"
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup
	@$(BIN)/python benchmarks/plain_vs_generate.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
