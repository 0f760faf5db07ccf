# Needs Python 3.11 or later and make; the rest is installed into .venv by the first target that wants it.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ENGINES := $(VENV)/.engines
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-all check format clean
help:       ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Paceline needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,examples,tensorboard,codecs,serve]'
	@touch $@

# Tests of engines and of others' models skip what is not there; Ray and transformers come from pip, the other engines
# from the system (see CONTRIBUTING.md), timm and torchvision by hand: torchvision must be built for the torch that is here.
$(ENGINES): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[ray,outside]' && touch $@ || \
	  echo "Ray and transformers cannot be installed here: their tests are skipped"

demo: $(READY)      ## train on digits with two members
	$(BIN)/paceline run -n 2 examples/digits.py

test: $(READY)      ## the fast suite
	$(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 4 --dist worksteal

test-all: $(ENGINES) test  ## slow and engine tests too, one at a time
	$(BIN)/python -m pytest -m slow

check: $(READY)     ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)    ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:              ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .bench
