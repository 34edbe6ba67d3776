# Everything runs in a project-local virtual environment: built by the first target that needs it,
# reused afterwards, brought up to date when pyproject.toml or the pins change.

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS  := requirements/constraints.txt
PIP   := $(BIN)/python -m pip --disable-pip-version-check --quiet

# --dist loadfile keeps a file's tests in one process, so that module fixtures are built once.
PYTEST := $(BIN)/python -m pytest -q
XDIST  := -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test test-lowest check format bench proof lock clean distclean

help: ## show this list
	@echo "usage: make <target>   (PYTHON=$(PYTHON), WORKERS=$(WORKERS))"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## build or refresh the virtual environment

demo: $(STAMP) ## thousands of writers, one pen, one SIGKILL: nothing lost, nothing twice
	@$(BIN)/python -m onepen.runtime.demo

test: $(STAMP) ## run the tests
	@$(PYTEST) $(XDIST) $(PYTEST_ARGS)

check: $(STAMP) ## lint, formatting, types (mypy and basedpyright, both strict)
	@echo "ruff check";        $(BIN)/ruff check --quiet .
	@echo "ruff format";       $(BIN)/ruff format --check --quiet .
	@echo "mypy";              $(BIN)/mypy --no-error-summary
	@echo "basedpyright";      $(BIN)/basedpyright
	@echo "all checks passed"

format: $(STAMP) ## sort imports and format
	@$(BIN)/ruff check --quiet --select I --fix .
	@$(BIN)/ruff format --quiet .

bench: $(STAMP) ## run the benchmarks
	@PYTHONPATH=. $(BIN)/python -m benchmarks
	@PYTHONPATH=. $(BIN)/python -m benchmarks.hand_overs
	@PYTHONPATH=. $(BIN)/python -m benchmarks.bridge

# The soak first and alone: it judges the gaps of an event loop.
proof: $(STAMP) ## the long campaign, PROOF-1 to PROOF-10, with a report in build/proof
	@mkdir -p build/proof
	@$(BIN)/onepen stress --profile soak --seed 1 --html build/proof/soak.html \
	  --json build/proof/soak.json
	@ONEPEN_PROFILE=proof $(PYTEST) -n $(WORKERS) --dist worksteal \
	  tests/crash tests/properties tests/protocol tests/simulation $(PYTEST_ARGS)

test-lowest: ## run the tests with the oldest dependencies that the metadata allows
	@$(MAKE) --no-print-directory VENV=.venv-lowest .venv-lowest/.lowest
	@$(MAKE) --no-print-directory VENV=.venv-lowest test

.venv-lowest/.lowest: requirements/lowest.txt .venv-lowest/.installed
	@$(PIP) install -r requirements/lowest.txt
	@touch $@

lock: ## move every pin to the newest version that installs here
	@rm -rf .venv-lock
	@$(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/python -m pip --quiet install --upgrade pip setuptools wheel
	@.venv-lock/bin/python -m pip --quiet install --no-build-isolation -e '.[dev]'
	@{ sed -n '/^#/p' $(PINS); .venv-lock/bin/python -m pip freeze --all --exclude onepen; } >$(PINS).new
	@mv $(PINS).new $(PINS)
	@rm -rf .venv-lock
	@echo "$(PINS) refreshed; run: make check test test-lowest"

clean: ## remove caches and build products, keep the virtual environment
	@rm -rf build dist htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## remove the virtual environments as well
	@rm -rf .venv .venv-*

# A system Python may come without ensurepip; its own pip then installs into the new environment.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "onepen needs Python 3.11 or newer, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@echo "building $(VENV) with $$($(PYTHON) --version) (once)"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	  rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) \
	  && $(PYTHON) -m pip --python $(BIN)/python --quiet install pip; }

# Without build isolation the pinned setuptools builds the package, and nothing is fetched twice.
$(STAMP): pyproject.toml $(PINS) | $(BIN)/python
	@echo "installing the development environment"
	@$(PIP) install -c $(PINS) pip setuptools wheel
	@$(PIP) install -c $(PINS) --no-build-isolation -e '.[dev]'
	@touch $@
