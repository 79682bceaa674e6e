# demo, test, soak, lint and bench work on a fresh machine: each first installs raypp into .venv, once.
# PYTHON chooses the interpreter that .venv is made from: make demo PYTHON=python3.12
# WORKERS is the number of processes for tests without Ray; 0, one after the other, where engines would share a GPU.

PYTHON ?= python3
WORKERS ?= logical
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_DOCS := .venv/.installed_docs

.PHONY: install demo test soak lint bench docs clean

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/raypp generate tiny --num-stages 2 --prompt "def main(" --max-tokens 64

# Tests of actors and of GPUs follow one after the other: they use fixed ports and whole devices, and look for what
# others leave behind. Files without Ray begin in their order, which has the long ones in front. A worker that a hanging
# test has ended is not replaced: pytest-xdist would wait for the new one for ever, instead of naming the test.
test: $(INSTALLED)
	$(BIN)/python -m pytest --ignore tests/ray --ignore tests/gpu --ignore tests/soak --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0; \
	  status=$$?; $(BIN)/python -m pytest tests/ray tests/gpu && exit $$status

# What takes long: hostile clients, chaos, clients' real packages, clean environments, other tests in full size. At most
# an hour; it writes tests/soak/last_run.md. Installing a client's packages takes minutes in which no test says anything.
soak: $(INSTALLED)
	$(BIN)/python -m pytest tests/soak --override-ini faulthandler_timeout=1800 --verbose

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)
	$(BIN)/python benchmarks/offline_throughput.py --compare hf
	$(BIN)/python benchmarks/step_overhead.py

# The site. A warning is an error. Pages can be opened as files; search needs a server.
docs: $(INSTALLED_DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site 8080"

clean:
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "raypp needs Python 3.11 or newer; '$(PYTHON)' is not. Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	@touch $@
