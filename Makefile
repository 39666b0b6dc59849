# Two commands set everything up: `make demo` and `make test`. Each builds .venv if it is missing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-slow lint format bench clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,report,track,dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/meshwise survey gpt2-tiny --data stdlib --devices 1,2 --steps 24 --evaluate-every 8 --out demo-run --replace

test: $(STAMP) lint
	$(BIN)/python -m pytest

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/executors.py

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache build dist demo-run
