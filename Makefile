# Everything is installed into .venv; nothing outside this folder changes, except the demo model's
# cache. A second run installs again only if pyproject.toml or TORCH changed.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The requirement to install torch by, e.g. TORCH=torch==2.13.0. Remembered in .venv; the default
# is what pyproject.toml asks for.
TORCH ?=
# The interpreter of .venv: by default the newest at hand.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3.10 python3 python; do \
	$$python -c $(USABLE) 2>/dev/null && { echo $$python; break; }; done)
USABLE := 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))'
# Test processes side by side; each uses one thread.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# The oldest transformers that pyproject.toml admits.
FLOOR = $(shell sed -n 's/.*"transformers>=\([0-9.]*\).*/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test lint types test-main test-interpret test-aot test-floor sweep bench clean FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "variables: PYTHON (interpreter), TORCH (requirement), WORKERS (tests), ARGS (demo, bench, sweep)"

demo: $(VENV)/.demo ## install, fetch the demo model, stream an answer, compare with plain generate
	$(BIN)/python examples/quickstart.py $(ARGS)

test: lint types test-main test-interpret test-aot test-floor ## install, lint, types, all tests

lint: $(VENV)/.dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## mypy on both packages
	$(BIN)/mypy

test-main: $(VENV)/.dev ## the tests that need no process of their own
	$(PYTEST) -n $(WORKERS) -m "not interpret and not aot"

test-interpret: $(VENV)/.dev ## the kernels in Triton's interpreter
	TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS) -m interpret tests/ops

test-aot: $(VENV)/.dev ## the kernels compiled ahead of time for every architecture
	$(PYTEST) -n $(WORKERS) -m aot tests/ops

test-floor: $(VENV)/floor/.installed ## families and generate against the oldest transformers
	PYTHONPATH="$(CURDIR)/$(VENV)/floor" $(BIN)/python -c \
		"import transformers as t; assert t.__version__ == '$(FLOOR)', t; print(t.__version__)"
	PYTHONPATH="$(CURDIR)/$(VENV)/floor" $(PYTEST) -n $(WORKERS) tests/families \
		tests/generate

sweep: $(VENV)/.dev ## every causal-LM type of transformers against plain generate, half an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.families.sweep $(ARGS)

bench: $(VENV)/.dev ## measure on the demo model, some 20 minutes, no other load please
	$(BIN)/python examples/benchmark_spine.py $(ARGS)

clean: ## remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info .benchmarks .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.10 with venv and ensurepip found:" \
		"install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c $(USABLE) || { echo "make: PYTHON=$(PYTHON) is not a Python >= 3.10" \
		"with venv and ensurepip" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip

# Also pip's constraint file, so that no later install replaces the torch that was asked for.
$(VENV)/torch.txt: FORCE | $(BIN)/python
	@if test -n "$(TORCH)" || ! test -f $@; then \
		echo "$(TORCH)" | cmp -s - $@ || echo "$(TORCH)" > $@; fi

$(VENV)/.torch: $(VENV)/torch.txt
	@! grep -q . $< || { set -x; $(PIP) install --quiet --requirement $<; }
	@touch $@

$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: pyproject.toml $(VENV)/.torch
	$(PIP) install --quiet --constraint $(VENV)/torch.txt --editable '.[$*]'
	@touch $@

# With its dependencies: an older transformers asks for older companions, too.
$(VENV)/floor/.installed: $(VENV)/.dev
	rm -rf $(@D)
	$(PIP) install --quiet --target $(@D) transformers==$(FLOOR)
	@touch $@
