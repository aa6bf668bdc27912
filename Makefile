# Needs Python 3.10 or newer (PYTHON), git, make, and the Python package index. Everything else is made here.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
ALONE   = $(BIN)/python -m pytest --last-failed --last-failed-no-failures none
CORE    = "not engine and not trainer and not releases"
# Named, so that a machine with a CPU build of it at hand takes that one; any torch of [extract] will do.
TORCH  ?= torch==2.13.0
# The releases of SGLang that every run of the tests serves: tests/engine/conftest.py says which those are.
ERAS    = 0.4.6.post5 0.5.9 0.5.23
HSDUMP  = $(wildcard tests/engine/test_hsdump*.py)
OTHERS  = tests $(addprefix --ignore=,$(HSDUMP))
# The engines (1.4 GB each) live outside the checkout; see examples/cpu_engine/venv.py.

.PHONY: setup demo test test-core test-engine test-releases test-pins differential lint bench faults clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)" -e '.[extract]' --group dev
	touch $@

demo: setup
	$(BIN)/python -m examples.demo

test: test-core test-engine

# Many tests watch the deaths of processes; one that a loaded machine was too slow for is tried once more, alone.
test-core: setup
	$(BIN)/python -m pytest -n 2 -m $(CORE) tests || $(ALONE) -m $(CORE) tests

# The environments are built side by side before. Starting a server keeps one core busy, so those of hsdump, which patch
# copies, run two at a time; the others need the machine, or the environment itself, to themselves.
test-engine: setup
	$(BIN)/python -m examples.cpu_engine.venv $(ERAS)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m engine $(HSDUMP) || $(ALONE) -m engine $(HSDUMP)
	$(BIN)/python -m pytest -m "engine or trainer" $(OTHERS) || $(ALONE) -m "engine or trainer" $(OTHERS)

# hsdump served by the ten releases that can on a CPU, and the table of docs/hsdump-releases.md; an hour or two, 15 GB of
# environments.
test-releases: setup
	PATCHKIT_TEST_RELEASES=all $(BIN)/python -m pytest -n 2 --dist worksteal -m engine --junitxml=.pytest_cache/releases.xml \
	  $(HSDUMP)
	$(BIN)/python -m tests.engine.table .pytest_cache/releases.xml

# Thousands of random diffs beside git and GNU diff, and every mutation of a patch; prints the counts.
differential: setup
	PATCHKIT_EXAMPLES=3000 $(BIN)/python -m pytest -q -s tests/test_diff_against_git.py

# hsdump on the files of every pinned release: fetches 2.5 GB of wheels once, keeps a few MB.
test-pins: setup
	$(BIN)/python -m pytest -m releases tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	for script in bench/bench_*.py; do $(BIN)/python $$script || exit 1; done

faults: setup
	$(BIN)/python -m tests.faults

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
