# make setup · serve [MODEL=…] [PORT=…] · test (lint, types, contracts, pytest) · test-browser · coverage · clean
#
# Everything is installed into .venv under constraints.txt. Where pip finds a CPU build of the pinned torch it is
# taken; otherwise the default build comes. PIP_INDEX_URL and friends are honoured as usual.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

MODEL ?=
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
PYTEST_ARGS ?=
# Processes that share the tests: `make test WORKERS=4` where there are more processors and memory (a GiB each).
WORKERS ?= 2

ROOMS := events fsm kernels executor replay server leftfold tests

NEED_PYTHON := import sys; \
	v = sys.version_info; \
	v < (3, 11) and sys.exit(f"leftfold needs Python 3.11 or newer; {sys.executable} is {v.major}.{v.minor}. " \
	"Say which one to use: make PYTHON=/path/to/python3.11")

.DEFAULT_GOAL := help
.PHONY: help setup compiled serve test test-browser lint types contracts pytest coverage clean

help:
	@sed -n '1s/^# //p' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) compiled

$(STAMP): pyproject.toml constraints.txt
	@if [ -x $(BIN)/python ]; then $(BIN)/python -c '$(NEED_PYTHON)'; else \
		command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) found: install Python 3.11 or newer" >&2; exit 2; }; \
		$(PYTHON) -c '$(NEED_PYTHON)' && $(PYTHON) -m venv $(VENV); fi
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[serve,test]'
	@touch $@

# The scheduler as machine code, in the user's cache; done at once where it is there. Without a compiler it stays as is.
compiled: $(STAMP)
	@$(BIN)/leftfold compile || echo "the scheduler stays interpreted, which is slower and no different" >&2

serve: setup
	$(BIN)/leftfold serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

# What takes one processor each goes side by side.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j2 lint types contracts compiled
	@$(MAKE) --no-print-directory pytest

lint: $(STAMP)
	$(BIN)/ruff check $(ROOMS)

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

pytest: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# The debugger in a real browser: Playwright from the extra, Chromium from the system (apt-get install chromium).
test-browser: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	LEFTFOLD_BROWSER=1 $(BIN)/python -m pytest tests/browser $(PYTEST_ARGS)

# What property tests and fixed fuzz runs reach of events/ and fsm/, what all tests without a server reach of replay/;
# fails on a gap without a reason in tests/coverage-exceptions.toml. Takes some minutes.
COVERED := build/coverage
coverage: export LEFTFOLD_COMPILED := off
coverage: $(STAMP)
	rm -rf $(COVERED) && mkdir -p $(COVERED)
	COVERAGE_FILE=$(COVERED)/properties $(BIN)/coverage run -m pytest tests/property \
		--fuzz-seconds 0 --hypothesis-seed 1 -p no:cacheprovider
	for run in lite:300 swarm:300 faults:300; do \
		COVERAGE_FILE=$(COVERED)/properties $(BIN)/coverage run --append -m leftfold fuzz \
			--profile $${run%:*} --runs $${run#*:} --seed 1 || exit 1; done
	COVERAGE_FILE=$(COVERED)/examples $(BIN)/coverage run -m pytest tests/unit tests/golden -p no:cacheprovider
	$(BIN)/coverage combine --quiet --keep --data-file $(COVERED)/all $(COVERED)/properties $(COVERED)/examples
	for of in properties all; do \
		$(BIN)/coverage json --quiet --data-file $(COVERED)/$$of -o $(COVERED)/$$of.json || exit 1; done
	$(BIN)/python tests/coverage_gaps.py $(COVERED)/properties.json $(COVERED)/all.json

clean:
	rm -rf build dist leftfold.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(ROOMS) docs -type d -name __pycache__ -prune -exec rm -rf {} +
