# `make demo` and `make test` do everything on a fresh machine, set-up included.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
# Python compiles modules when they are first imported: pip would compile 18,000, most of them never used.
PIP_OPTIONS := --quiet --disable-pip-version-check --no-compile
# Compiled files are kept, also where the environment forbids it: otherwise every process compiles the tests again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: docs setup demo test test-fast lint bench test-gpu test-multi-gpu test-page test-clients test-ray

setup: $(STAMP)

# The newest pip takes half the time of that of Python 3.11, which ensurepip would install first.
NEW_PIP := install $(PIP_OPTIONS) --upgrade pip
# What the engine needs is installed first, torch with its range: a plain `torch` would download gigabytes of
# CUDA packages. hatchling builds this package; pip would install it for that alone otherwise.
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv --without-pip .venv
	@$(PYTHON) -m pip --python $(BIN)/python $(NEW_PIP) || \
		{ $(BIN)/python -m ensurepip && $(BIN)/python -m pip $(NEW_PIP); }
	$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
		print(*project["project"]["dependencies"], *project["build-system"]["requires"], "editables", sep="\n")' \
		> .venv/requirements.txt
	$(BIN)/python -m pip install $(PIP_OPTIONS) --requirement .venv/requirements.txt
	@$(WHILE_PIP_RUNS)
	$(BIN)/python -m pip install $(PIP_OPTIONS) --no-build-isolation --editable ".[dev]"
	@touch $@

demo: setup
	$(BIN)/draftproof generate --compare < examples/demo_prompt.txt
	$(BIN)/draftproof generate --compare --speculative-config '{"method": "eagle3", "num_speculative_tokens": 4}' < examples/demo_question.txt

lint: setup
	$(BIN)/ruff check src tests bench examples
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/mypy

# Some tests wait for servers, so there is one worker more than cores.
NUM_WORKERS = $$($(BIN)/python -c "import os; print(min(4, (os.cpu_count() or 1) + 1))")

# Kernels are compiled while pip, which uses one core, installs what only tests need.
test: WHILE_PIP_RUNS = PYTHONPATH=src $(BIN)/python tests/support/compile_kernels.py > .venv/compile_kernels.log 2>&1 &
# Lint runs beside the tests with low priority. Each worker uses one core, also in libraries of numpy.
test: setup
	@nice $(MAKE) --no-print-directory lint & lint=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(NUM_WORKERS) --max-worker-restart 0 --dist loadfile \
		--no-loadscope-reorder --cpu-times 30; tests=$$?; \
	wait $$lint || { echo "make lint failed: see its output above"; exit 1; }; exit $$tests

# Inner loop: no download, no slow file.
test-fast: setup
	$(BIN)/python -m pytest -n $(NUM_WORKERS) --dist worksteal -m "not slow and not network and not gpu"

# Write the option table of docs/options.md.
docs: setup
	$(BIN)/python -m draftproof.cli.options_doc docs/options.md

bench: setup
	$(BIN)/python bench/cpu.py

# On a machine with a GPU, with its own python: needs torch, triton, pytest, pytest-xdist and what pyproject.toml
# lists.
# Older versions of pytest-benchmark, where installed, warn at each start with xdist; warnings are errors.
GPU_PYTEST := PYTHONPATH=src $(PYTHON) -m pytest -p no:benchmark
test-gpu:
	$(GPU_PYTEST) -n 14 --dist worksteal tests/gpu --ignore tests/gpu/test_multi_gpu.py

# On a machine with at least 2 GPUs, with its own python: tensor parallelism over NCCL.
test-multi-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu/test_multi_gpu.py

# The page in the Chromium of this machine (Debian: apt install chromium).
test-page: setup
	$(BIN)/python -m pip install $(PIP_OPTIONS) --editable ".[dev,page]"
	$(BIN)/python -m pytest tests/serve/test_page.py tests/page

# Clients of other projects against the server, each in an environment of its own under .clients (needs npm).
test-clients: setup
	$(BIN)/python tests/clients/run.py

# Replicas on Ray Serve, on this machine, in an environment of its own under .ray.
test-ray:
	@test -x .ray/bin/python || $(PYTHON) -m venv .ray
	.ray/bin/python -m pip install $(PIP_OPTIONS) "torch>=2.11,<2.14"
	.ray/bin/python -m pip install $(PIP_OPTIONS) --editable ".[dev,ray]"
	.ray/bin/python -m pytest tests/serve/test_ray.py
