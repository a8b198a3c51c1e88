# Two commands on a fresh machine with Python >= 3.11: `make demo` and `make test`; `make soak` runs what CI runs besides,
# `make nightly` the rest; `make site` builds the pages and the API reference.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# Two threads on two shared cores measured 8 x slower than one: one thread a process unless told otherwise.
export OMP_NUM_THREADS ?= 1
# uv compiles no bytecode by default; without .pyc files every process spends 10 s on imports.
export UV_COMPILE_BYTECODE := 1
# Without bytecode each process of the tests compiles the package and rewrites all asserts: 10 s of CPU.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test soak nightly real site lint constraints clean
demo: $(VENV)/.ready
	$(BIN)/lit-layers fit --config recipes/quickstart/gpt2.yaml --resume last

# A file's tests stay together, as they share what is costly to make. Three processes for two cores: many tests wait.
# Each tier prints its slowest ten tests, and the ten files that take most CPU. OPTIONS adds options of pytest.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations=10

test: $(VENV)/.ready
	$(PYTEST) -m "not soak and not nightly" $(OPTIONS)

# What CI runs besides: several ranks, evaluation at length, a browser, each family of models, one recipe of each paper.
soak: $(VENV)/.ready
	$(PYTEST) -m "soak and not nightly" $(OPTIONS)

# Random kills, fuzzing, every documented command, all recipes of papers, products over families.
nightly: $(VENV)/.ready
	$(PYTEST) -m nightly $(OPTIONS)

# The weights of two small released models (170 MB), which the tests marked realmodel read; without them these skip.
real: $(VENV)/.real

# The pages of docs/ and the API reference from the docstrings, as a static site in ./site.
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

# New pins for every platform and Python; hashes, but no registry addresses.
constraints: $(VENV)/.ready
	PATH="$(PATH):$(abspath $(BIN))" uv pip compile --universal --python-version 3.11 --all-extras --generate-hashes --no-annotate --no-header --no-emit-index-url --upgrade pyproject.toml --output-file constraints.txt

clean:
	rm -rf $(VENV) build dist site *.egg-info
