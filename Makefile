# TORCH_INDEX: address of a package index that carries PyTorch's CPU build, for machines whose default index does not.
# EXTRAS: optional dependencies to install besides the developer's.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev,models
ifdef TORCH_INDEX
export PIP_EXTRA_INDEX_URL := $(TORCH_INDEX)
endif
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: replay run test quick long lint compiled clean

replay: $(VENV)/.installed
	$(BIN)/epsim replay sample --ranks 16 --nodes 2 --redundant 32 --out out \
		--policy contiguous --policy eplb --policy eplb+lplb --policy eplb+lplb+waterfill \
		--policy searched+lplb --policy "searched+lplb(counts=gathered)+waterfill"

run: $(VENV)/.installed
	$(BIN)/epsim run sample --model tiny --steps 24 --launcher torchrun --ranks 4 --redundant 8 --device cpu --out out/run \
		--policy contiguous --policy eplb --policy eplb+lplb --policy "eplb+lplb(counts=gathered)+waterfill"
	$(BIN)/epsim report out/run

test: $(VENV)/.tested
	$(MAKE) -j 2 lint compiled
	$(PYTEST) -m "not gpu and not long"

quick: $(VENV)/.tested lint
	$(PYTEST) -m "not gpu and not long and not slow"

long: $(VENV)/.tested
	$(PYTEST) -m "long and not gpu"

# What numba compiles is kept beside the sources; mypy leaves a core free for it.
compiled: $(VENV)/.tested
	$(BIN)/python -m tests.runtime.warm

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy epsim tests

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.tested: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[$(EXTRAS)]"
	@command -v chromedriver > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null \
		&& apt-get update -q > /dev/null && apt-get install -y -q chromium chromium-driver > /dev/null; } \
		|| echo "no chromium and chromium-driver: tests of the report in a browser are skipped"
	touch $@

clean:
	rm -rf out build dist *.egg-info
