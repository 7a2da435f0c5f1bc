# `make demo` trains a small model and samples from it; `make test` runs the tests. Each first makes the virtual
# environment that it needs, from pyproject.toml and the exact versions in constraints.txt.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt

BIN := $(VENV)/bin
# Stamps are written only when an installation has succeeded, so that an interrupted one is taken up again.
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev
PIP_INSTALL = $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check --constraint $(CONSTRAINTS)
# pip's own progress bars where somebody watches, silence in a log.
QUIET := $(shell test -t 2 || echo --quiet)

# A process of one thread for each core; each takes about a gigabyte.
EVERY_CORE := --numprocesses=logical --maxprocesses=8 --dist=worksteal

.DELETE_ON_ERROR:
.PHONY: help demo test test-oldest test-hf lint bench bench-gpu wheel clean

help:  ## show this list
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile
	@echo "Variables: PYTHON=$(PYTHON) makes the environment in VENV=$(VENV), with the versions of CONSTRAINTS=$(CONSTRAINTS)."

demo: $(RUN)  ## train a minGRU on Python's own source files (about three minutes), then print a sample
	$(BIN)/hf-recurrent train examples/recipes/stdlib_mingru.yaml --overwrite
	$(BIN)/hf-recurrent generate --model runs/demo --prompt "def " --max-new-tokens 200

test: $(DEV)  ## run the tests, on every core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=10 $(EVERY_CORE)

test-oldest: .venv-oldest.txt  ## run the tests in .venv-oldest, with the oldest versions that pyproject.toml allows (fetches gigabytes)
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=$<

.venv-oldest.txt: pyproject.toml
	grep -oE '"[A-Za-z0-9._-]+>=[0-9.]+' $< | sed 's/"//; s/>=/==/' | sort -u >$@

test-hf: $(DEV)  ## run Transformers' own common tests on every model (fetches its source distribution once)
	$(BIN)/python -m pytest -q --durations=5 tests/hf

lint: $(DEV)  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(DEV)  ## measure scans and decoding against their limits and peers, into runs/benchmarks
	$(BIN)/python benchmarks/scan.py --output runs/benchmarks
	$(BIN)/python benchmarks/decode.py --output runs/benchmarks

bench-gpu: $(DEV)  ## check and measure the CUDA kernels (under eight minutes), into benchmarks/results
	$(BIN)/python benchmarks/gpu.py

wheel: $(DEV)  ## build the source distribution and the wheel, into dist
	$(BIN)/python -m build

clean:  ## remove build products and caches (keeps runs and the virtual environment)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find hf_recurrent tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment whose pip works is kept as it is; anything else is made anew.
$(VENV)/.made:
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python 3.10 or later is needed; choose one with: make PYTHON=python3.12" >&2; exit 2; }; \
	  echo "Making the virtual environment $(VENV)"; \
	  $(PYTHON) -m venv --clear $(VENV); }
	@touch $@

$(RUN): $(VENV)/.made pyproject.toml $(CONSTRAINTS)
	@echo "Installing hf_recurrent and what it needs (PyTorch is the large part; minutes the first time)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(DEV): $(VENV)/.made pyproject.toml $(CONSTRAINTS)
	@echo "Installing hf_recurrent and what its tests need (PyTorch is the large part; minutes the first time)"
	@$(PIP_INSTALL) --editable ".[cuda,dev]"
	@touch $(RUN) $@
