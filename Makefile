# Everything from a fresh clone with python3, make and a network. `make` alone lists the targets.
#
#   make train ARGS="--epochs 2"      make train RANKS=4      make test ARGS="-k batches"      make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready-for-ddp_loop
ARGS ?=
JOBS ?= 3
KERNELS ?= --channels-last --precision bf16
RANKS ?= $(shell $(BIN)/python -c "import torch; print(torch.cuda.device_count() or 2)")

.DEFAULT_GOAL := help
.PHONY: help setup train test test-rest test-all matrix dist check docs format bench gpu clean

help:  ## list the targets
	@awk -F ':.*##' '/^[a-z-]+:.*##/ { printf "make %-11s%s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## make .venv and install into it; the other targets do this themselves

train: $(READY)  ## train the digit network on all GPUs, else on 2 CPU ranks (RANKS=, KERNELS=, ARGS=)
	$(BIN)/python -m ddp_loop run --ranks $(RANKS) examples/digits/train.py $(KERNELS) $(ARGS)

# Without bytecode, which the environment may forbid, each process compiles all modules again. It lies beside its source,
# as that of the installed packages does, and is not looked for elsewhere.
test test-rest test-all: export PYTHONDONTWRITEBYTECODE =
# These tests wait for processes that they start: four keep two cores busy for nine tenths of the time.
test-rest test-all: JOBS = 4

test: $(READY)  ## run the quick tests (ARGS=), in JOBS= processes, 0 for this one
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not full" $(ARGS)

test-rest: $(READY)  ## run what make test leaves out
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "full" $(ARGS)

test-all: $(READY)  ## run all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

matrix: $(READY)  ## run the quick tests on the oldest and the newest Python and torch (ARGS=); downloads some GB
	$(BIN)/python -m tests.matrix $(ARGS)

dist: $(READY)  ## build a wheel and a source distribution into dist/, and try them (tests/project/test_distribution.py)
	$(BIN)/python -m pytest tests/project/test_distribution.py
	$(BIN)/python -m build --no-isolation --outdir dist .

check: $(READY)  ## format, lint, types, the tests of the architecture, and the documentation; changes nothing
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest tests/project/test_architecture.py tests/project/test_rooms.py
	$(MAKE) --no-print-directory docs

# Anew each time: a second run would not repeat the warnings of pages that have not changed since.
docs: $(READY)  ## build the documentation and the API reference, warnings as errors, into build/docs
	$(BIN)/python -m sphinx -E -q -W --keep-going -c docs/site -d build/doctrees . build/docs
	@echo "build/docs/index.html"

format: $(READY)  ## format the code and repair what the linter can
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

bench: $(READY)  ## measure (ARGS=); alone on the machine, please
	$(BIN)/python -m benchmarks $(ARGS)

# A machine with GPUs may have no network. Where PYTHON has what is needed it runs, without .venv.
gpu:  ## do what needs a GPU, in 8 minutes, into docs/benchmarks/gpu.md (ARGS=); without one, rehearse it
	@if $(PYTHON) -c "import hypothesis, numpy, pytest, safetensors, torch" 2> /dev/null; \
	then $(PYTHON) -m benchmarks gpu $(ARGS); \
	else $(MAKE) --no-print-directory setup && $(BIN)/python -m benchmarks gpu $(ARGS); fi

clean:  ## remove caches and build output; .venv and runs stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Set-up runs once, and again when a pin or the package's own metadata changes. The stamp is written
# last: an interrupted set-up is done again.
$(READY): requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ddp_loop needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
