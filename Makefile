# make run and make test are all a newcomer needs: Python 3.11 or newer, make, this checkout.
# Overridable: VENV (where the virtual environment is), PYTHON (which makes it), ARGS (passed on), MINUTES (of
# the soak), SMOLLM2 (the model).

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
ARGS ?=
MINUTES ?= 30
SMOLLM2 ?= models/SmolLM2-135M-Instruct
INSTALLED = $(VENV)/.installed
TESTABLE = $(VENV)/.installed-test

.PHONY: help run run-smollm2 test soak bench lint format docs clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

run: $(INSTALLED) ## install into .venv and train: python run.py --mode async
	$(VENV)/bin/python run.py --mode async $(ARGS)

run-smollm2: $(INSTALLED) $(SMOLLM2)/config.json ## three steps of a real model with a tool, after fetching it (95 MB) once
	$(VENV)/bin/python run.py --config recipes/smollm2-calculator.toml --model $(SMOLLM2) $(ARGS)

# Tests start some two hundred Python processes. Where the environment forbids to keep byte code, each would compile
# what it imports of this project.
test: export PYTHONDONTWRITEBYTECODE =
test: $(TESTABLE) ## install into .venv and run the tests
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

soak: $(TESTABLE) ## the tests marked slow (up to an hour), then MINUTES of runs whose processes are killed and frozen at random
	$(VENV)/bin/python -m pytest -m slow $(ARGS)
	$(VENV)/bin/python -m bench.soak --minutes $(MINUTES) --out runs/soak

bench: $(INSTALLED) ## asynchronous against synchronous training, side by side
	$(VENV)/bin/python -m bench.async_vs_sync $(ARGS)

lint: $(TESTABLE) ## ruff check and ruff format --check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(TESTABLE) ## let ruff rewrite the files
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(INSTALLED) ## write docs/files.md, and the tables of other pages, from the code
	$(VENV)/bin/python docs/update.py

clean: ## remove the virtual environments and caches (never runs/ and models/)
	rm -rf .venv .ci-venv .pytest_cache .ruff_cache .hypothesis *.egg-info build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(SMOLLM2)/config.json: | $(INSTALLED)
	$(VENV)/bin/python -m bench.fetch_smollm2 $(SMOLLM2)

# The mark is written last, so an install that was broken off is done again.
$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found; install it, or name it: make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt -e '.[hf,data,endpoint]'
	@touch $@

# What only tests need: the linter, and the packages of others that environments and agents are tested with.
$(TESTABLE): $(INSTALLED)
	$(VENV)/bin/python -m pip install -c constraints.txt -e '.[hf,data,endpoint,test,tasks,verifiers]'
	@touch $@
