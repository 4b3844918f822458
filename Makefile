# Two commands do everything on a fresh machine with Python 3.11, pip and make: `make demo`, `make test`.
PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: demo test lint bench docs trust dist

# torch comes first and pinned: with a range, pip would choose the newest build and several GB of CUDA.
$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH) -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev,docs]'
	touch $@

demo: $(BIN)/.installed
	$(BIN)/rankwise demo --out demo-out

# Reports are looked at in a real browser where one can be had; those tests are skipped elsewhere.
test: lint
	@command -v chromium >/dev/null 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && \
	    (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium) >/dev/null 2>&1; } || \
	  echo "no chromium: browser tests will be skipped"
	$(BIN)/python -m pytest -n 2

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(BIN)/.installed
	$(BIN)/python benchmarks/table.py
	$(BIN)/python benchmarks/budget.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/pruning.py
	$(BIN)/python benchmarks/latency.py

# Half an hour on two cores: crash states, failing operations, fuzzing. What it promises: docs/reliability.md.
trust: $(BIN)/.installed
	$(BIN)/python tests/trust/run.py

# The site, in site/: every warning is an error, and every link must lead somewhere.
docs: $(BIN)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python docs/site/links.py site

# What an index serves: a source archive and a wheel, in dist/.
dist: $(BIN)/.installed
	$(BIN)/python -m build --no-isolation
