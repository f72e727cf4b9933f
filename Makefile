# Three commands do everything on a fresh Debian or Ubuntu machine with Python 3.11 or newer:
#   make demo    sets up, then trains a GPT-2-sized model whose state lives on NVMe
#   make test    sets up, then passes the tests
#   make docs    sets up, then writes the documentation as a site to build/site
# Set-up is scripts/setup.sh: a virtual environment in .venv, liburing where it may be installed, the
# build. It runs again only when something it depends on has changed.

PYTHON := .venv/bin/python

# Compiled modules are kept, whatever the environment says: hundreds of processes of the tests would
# compile the package again, and every worker the tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test exhaustive witness affected docs quick lint types format setup gpu clean

demo:
	scripts/setup.sh hf
	.venv/bin/infinity train examples/demo.toml

# Three workers on two cores: tests wait for the drive, and for ranks and runs that they start. A worker
# takes half a minute of a core before its first test.
test: setup
	$(PYTHON) -m pytest -n 3 --dist worksteal --durations=25

# The suite with all cases of its large products: before a release, and after a change of what they
# are about.
exhaustive: setup
	$(PYTHON) -m pytest -n 3 --dist worksteal -m ""

# Seeded runs leave what they left at the last commit that changed scripts/witness.json.
witness: setup
	$(PYTHON) scripts/witness.py

# Tests of what has changed since main: those that import a changed file, or else its folder.
affected: setup
	files=$$($(PYTHON) scripts/affected_tests.py) && $(PYTHON) -m pytest -q $$files tests/tidy

# A warning is an error. A test of the suite builds the site, too.
docs: setup
	$(PYTHON) -m mkdocs build --strict

# What needs no engine: rules, formats, kernels, configuration. The first check of a change.
quick: setup
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist worksteal -q tests/tidy tests/unit tests/property tests/ops

lint: setup types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	.venv/bin/lint-imports

types: setup
	$(PYTHON) -m mypy

format: setup
	$(PYTHON) -m ruff check --fix-only .
	$(PYTHON) -m ruff format .

gpu: setup
	$(PYTHON) -m pytest tests/gpu

setup:
	scripts/setup.sh hf,dev

clean:
	rm -rf build .venv .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
