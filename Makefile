# make serve      a real model answering on http://127.0.0.1:8000, from a fresh checkout
# make test       the tests that need neither a GPU nor an hour
# make test-vllm  the vLLM plugin against a real vLLM (CPU) in an environment of its own, .venv-vllm-VERSION; VLLM=0.31.0 for another
# Override:       make serve MODEL=DIR PORT=9000 TORCH="torch==2.12.0"

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VLLM   ?= 0.32.0
MODEL  ?= smollm2-135m
HOST   ?= 127.0.0.1
PORT   ?= 8000

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check
RUN_STAMP := $(VENV)/.headway-installed
DEV_STAMP := $(VENV)/.headway-installed-dev

.PHONY: help install dev serve test test-heavy test-portable sanitized test-sanitized test-emulated fuzz test-vllm lint clean
.DEFAULT_GOAL := help

help:
	@sed -n '/^$$/q; s/^# //p' Makefile
	@echo "Also:           make install | lint | test-heavy | test-portable | test-sanitized | test-emulated | fuzz | clean"

# torch comes first and by itself: its exact version picks the build this machine's package index offers (CPU or CUDA). A torch
# that is already importable stays; the second pip command replaces it only when it is out of the range in pyproject.toml.
$(RUN_STAMP): pyproject.toml setup.py $(wildcard src/headway/native/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install "$(TORCH)"
	$(PIP) install -e .
	@touch $@

# headway is there already: this adds what its extra names, and builds no kernels again.
$(DEV_STAMP): $(RUN_STAMP)
	$(PIP) install "headway[dev]"
	@touch $@

install: $(RUN_STAMP)

dev: $(DEV_STAMP)

serve: install
	$(BIN)/headway serve "$(MODEL)" --host $(HOST) --port $(PORT)

# Most tests keep one core busy whatever there is, so they run side by side, each process on one thread.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: dev
	$(PYTEST) -m "not heavy and not gpu"

test-heavy: dev
	$(PYTEST) -m "heavy and not gpu"

# What the compiled kernels compute, without them: what a machine without a compiler runs.
PORTABLE := tests/unit/test_attention.py tests/unit/test_models.py tests/unit/test_sampler.py tests/unit/test_distribution.py \
            tests/unit/test_eagle_network.py tests/unit/test_draft_model.py tests/conformance tests/integration/test_lossless.py
test-portable: dev
	HEADWAY_NATIVE=0 $(PYTEST) -m "not heavy and not gpu" $(PORTABLE)

# The compiled kernels under AddressSanitizer and UBSan; random shapes, lengths and page tables.
SANITIZED := build/sanitized/headway/native
SANITIZERS := LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0
sanitized: dev
	HEADWAY_SANITIZE=1 $(BIN)/python setup.py -q build_ext --build-temp build/sanitized/temp --build-lib build/sanitized
test-sanitized: sanitized
	$(SANITIZERS) HEADWAY_NATIVE=$(SANITIZED) $(BIN)/python -m pytest tests/unit/test_native.py tests/unit/test_native_pages.py

# What goes through AMX tiles, emulated in C and under the sanitizers: on every CPU. On one with AMX `test` runs the real ones as well.
EMULATED := build/emulated/headway/native
test-emulated: dev
	HEADWAY_SANITIZE=1 HEADWAY_EMULATE_TILES=1 $(BIN)/python setup.py -q build_ext --build-temp build/emulated/temp --build-lib build/emulated
	$(SANITIZERS) HEADWAY_NATIVE=$(EMULATED) $(BIN)/python -m pytest tests/unit/test_native.py

# Random page tables, most of them wrong, under the sanitizers.
EXAMPLES ?= 20000
fuzz: sanitized
	$(SANITIZERS) HEADWAY_NATIVE=$(SANITIZED) HEADWAY_FUZZ=$(EXAMPLES) $(BIN)/python -m pytest tests/unit/test_native_pages.py

# vLLM's own imports warn; its environment is kept.
VLLM_VENV := .venv-vllm-$(VLLM)
$(VLLM_VENV)/.installed: tests/vllm/install.sh pyproject.toml setup.py
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" tests/vllm/install.sh $(VLLM_VENV) $(VLLM)
	@touch $@

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest -o filterwarnings=default tests/vllm

lint: dev
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .venv-vllm-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
