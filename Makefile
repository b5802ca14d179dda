# make serve      a real model answering on http://127.0.0.1:8000, from a fresh checkout
# make test       the tests that need neither a GPU nor an hour
# Override:       make serve MODEL=DIR PORT=9000 TORCH="torch==2.12.0"

PYTHON ?= python3
TORCH  ?= torch==2.13.0
MODEL  ?= smollm2-135m
HOST   ?= 127.0.0.1
PORT   ?= 8000

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check
RUN_STAMP := $(VENV)/.headway-installed
DEV_STAMP := $(VENV)/.headway-installed-dev

.PHONY: help install dev serve test test-heavy lint clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile
	@echo "Also:           make install | lint | test-heavy | clean"

# torch comes first and by itself: its exact version picks the build this machine's package index offers (CPU or CUDA). A torch
# that is already importable stays; the second pip command replaces it only when it is out of the range in pyproject.toml.
$(RUN_STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install "$(TORCH)"
	$(PIP) install -e .
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	$(PIP) install -e ".[dev]"
	@touch $@

install: $(RUN_STAMP)

dev: $(DEV_STAMP)

serve: install
	$(BIN)/headway serve "$(MODEL)" --host $(HOST) --port $(PORT)

test: dev
	$(BIN)/python -m pytest -m "not heavy and not gpu"

test-heavy: dev
	$(BIN)/python -m pytest -m "heavy and not gpu"

lint: dev
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
