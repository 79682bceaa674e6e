# demo, test, soak, lint and bench work on a fresh machine: each first installs raypp into .venv, once. For demo that is
# what text needs; for the others, and for `make install` after it, everything.
# PYTHON chooses the interpreter that .venv is made from: make demo PYTHON=python3.12
# WORKERS is the number of processes that run tests; 0, one after the other, where engines would share a GPU.

PYTHON ?= python3
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores > 2 ? cores : 2)))
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_DEMO := .venv/.installed_demo
INSTALLED_DOCS := .venv/.installed_docs
SELDOM_IMPORTED := /(fontTools|matplotlib|models|mypy|networkx|pandas|pip|playwright|pygments|rllib|scipy|sympy|testing|tests?|tune)/
PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check install --constraint constraints.txt
# By a path, not by an import hook: this folder has the package's name, and from its parent it would be found first.
EDITABLE = --config-settings editable_mode=compat --editable

.PHONY: install demo test soak lint bench docs clean

install: $(INSTALLED)

define NEXT

That was `tiny`, a small model that comes with raypp, on two stages. Next:

  make install                                   the rest: server, structured outputs, notebook, development tools
  .venv/bin/raypp serve tiny --num-stages 2      a server with OpenAI's API; its page is at http://localhost:8000/
  .venv/bin/raypp generate MODEL --prompt TEXT   your model: a directory, or a Hugging Face id such as Qwen/Qwen3-0.6B
  examples/README.md, README.md                  short programs to begin with; where everything else is
endef
export NEXT

# Its processes import the same files, and the first to do so compiles them for all.
demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(INSTALLED_DEMO))
	@echo "Starting two stages of tiny and generating text: about 20 seconds."
	unset PYTHONDONTWRITEBYTECODE; $(BIN)/raypp generate tiny --num-stages 2 --prompt "def main(" --max-tokens 64
	@echo "$$NEXT"

# One process runs the tests of actors and of GPUs, one after the other; what they start needs about a core. With one
# process more than cores all take longer: on two cores 718 s instead of 561 for tests/parity and three folders of
# tests/unit. Files without Ray begin in their order, which has the long ones in front. tools/pytest_limits.py ends a
# test that hangs; a process that has ended is replaced, and the tests that follow are run. They all import the same
# files, which are compiled once.
test: $(INSTALLED)
	unset PYTHONDONTWRITEBYTECODE; $(BIN)/python -m pytest --ignore tests/soak \
	  --numprocesses $(WORKERS) --maxprocesses 9 --dist loadfile --no-loadscope-reorder

# What takes long. PART is one of clients, models, chaos, docs, sizes, each at most an hour; without it all follow each
# other. It writes tests/soak/last_run.md. Installing a client's packages takes minutes in which no test says anything.
soak: $(INSTALLED)
	$(BIN)/python -m pytest tests/soak $(if $(PART),--part $(PART)) --override-ini faulthandler_timeout=1800 --verbose

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

# pip compiles one file after the other. Some packages hold templates that are no Python; they stay as they are. Half of
# all files belong to what raypp imports little of: those are compiled when they are.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing raypp and its development tools into .venv: one to four minutes, once."
	$(PIP) --no-compile $(EDITABLE) ".[dev]"
	$(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM_IMPORTED)' .venv/lib || true
	@touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	$(PIP) $(EDITABLE) ".[docs]"
	@touch $@

# Bytecode is not made of every file, which takes half a minute, but by the run, of what it imports.
$(INSTALLED_DEMO): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what text needs into .venv: half a minute to two minutes, once."
	sed -n '/^dependencies = /,/^]/s/^  "\([^"]*\)".*/\1/p' pyproject.toml > .venv/demo.txt
	$(PIP) --no-compile --requirement .venv/demo.txt
	$(PIP) --no-compile --no-deps --no-build-isolation $(EDITABLE) .
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "raypp needs Python 3.11 or newer; '$(PYTHON)' is not. Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
