# Every target sets itself up. .venv is made when it is missing or does not run; packages are installed into it once, and
# again when pyproject.toml is newer than the stamp. PYTHON=... names the Python for a new .venv; ARGS=... is handed on.
VENV := .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install -qq --disable-pip-version-check
RUN_STAMP := $(VENV)/.installed-run
TEST_STAMP := $(VENV)/.installed-test
NOTEBOOKS = $(wildcard notebooks/*.ipynb)
ARGS =

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-mpi demo rl test fuzz test-gpu sanitize check notebook docs bench bench-check bench-gpu clean

# A .venv that does not run, or that came along when a checkout was copied or moved (its editable install points to
# the old folder), has no valid stamps.
ifneq ($(shell $(PY) -c 'print(open("$(VENV)/.checkout").read().strip())' 2>/dev/null),$(CURDIR))
.PHONY: $(RUN_STAMP) $(TEST_STAMP)
endif

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(TEST_STAMP) ## make .venv with everything that the tests need

setup-mpi: $(TEST_STAMP) ## build mpi4jax into .venv, for worlds of MPI (no root needed, a minute or two)
	$(INSTALL) openmpi mpi4py nanobind cython
	@mkdir -p $(VENV)/no-cuda
	CUDA_ROOT=$(CURDIR)/$(VENV)/no-cuda PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(INSTALL) --no-build-isolation mpi4jax

demo: $(RUN_STAMP) ## three real updates of Qwen3-0.6B on 8 CPU devices, every byte checked
	$(PY) -m shardfly_jax demo $(ARGS)

rl: $(TEST_STAMP) ## GRPO on CPU devices, rollouts synced after every step (ARGS="--mode async" chooses)
	$(PY) -m shardfly_jax rl $(ARGS)

# Property tests try the same cases in every run, so that a failure is of the change at hand; `make fuzz` looks for others.
test: $(TEST_STAMP) ## run the tests, a process per core (ARGS="-k word" chooses)
	$(PY) -m pytest -n auto --maxprocesses 8 --dist loadfile --hypothesis-profile=ci $(ARGS)

fuzz: $(TEST_STAMP) ## property tests on new random cases, again and again until one fails
	while $(PY) -m pytest -q -n auto --maxprocesses 8 -m hypothesis $(ARGS); do :; done; exit 1

check: $(TEST_STAMP) ## lint, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

notebook: $(TEST_STAMP) ## execute notebooks/*.ipynb in place
	@test -n "$(NOTEBOOKS)" || { echo 'no notebooks/*.ipynb here' >&2; exit 1; }
	$(PY) -c 'from nbclient.cli import main; main()' --inplace --timeout=600 $(ARGS) $(NOTEBOOKS)

docs: $(TEST_STAMP) ## the API reference from docstrings: docs/api/index.html
	$(PY) scripts/api_docs.py docs/api

bench: $(RUN_STAMP) ## run the benchmarks
	$(PY) -m benchmarks $(ARGS)

bench-check: $(RUN_STAMP) ## run them, and fail where a ratio is worse than the committed one
	$(PY) -m benchmarks --check $(ARGS)

test-gpu: $(TEST_STAMP) ## the tests that need a GPU (pip install 'jax[cuda13]' into .venv first)
	JAX_PLATFORMS=cuda,cpu $(PY) -m pytest -m "gpu or multigpu" $(ARGS)

TOOL = memcheck
sanitize: $(TEST_STAMP) ## random layouts and casts on a GPU under NVIDIA's compute-sanitizer (TOOL=racecheck, initcheck, synccheck)
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool $(TOOL) --error-exitcode 9 \
	  $(PY) -m pytest -m gpu -k "slices or casts" tests/test_persistent.py $(ARGS)

bench-gpu: $(RUN_STAMP) ## the persistent kernel against its bound, XLA and, on two GPUs, other systems (they need torch)
	$(PY) -m benchmarks on_gpu quantizing $(ARGS)
	$(PY) -m benchmarks on_gpus $(ARGS)

clean: ## remove build outputs and caches; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

define VENV_THAT_RUNS
PYTHON=$(PY) sh scripts/find-python >/dev/null 2>&1 || { \
	python=$$(sh scripts/find-python) && echo "making .venv with $$python" && "$$python" -m venv --clear $(VENV); }
@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null
endef

$(RUN_STAMP): pyproject.toml
	@$(VENV_THAT_RUNS)
	@echo "installing into .venv (once; about a minute)"
	@$(INSTALL) -e .
	@echo '$(CURDIR)' >$(VENV)/.checkout
	@touch $@

$(TEST_STAMP): pyproject.toml
	@$(VENV_THAT_RUNS)
	@echo "installing into .venv, with what the tests need and compare with (once; some minutes)"
	@$(INSTALL) -e '.[test,proof]'
	@echo '$(CURDIR)' >$(VENV)/.checkout
	@touch $(RUN_STAMP) $@
