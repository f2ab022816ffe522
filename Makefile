# preft: see CONTRIBUTING.md. `make demo` and `make test` work on a bare clone.

VENV ?= .venv
PYTHON ?=
# Test processes; engine tests hold one vLLM engine a process, and a file's tests share a process.
JOBS ?= 2
# More for pytest, such as PYTEST_ARGS="-k positions -x"
PYTEST_ARGS ?=

BIN := $(VENV)/bin
SETUP := VENV=$(VENV) $(if $(PYTHON),PYTHON=$(PYTHON)) scripts/setup.sh
# One thread a process: the models in the tests are tiny, and two processes share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)
# Triton decides at import whether it interprets kernels or compiles them: two processes, apart from all other tests.
KERNEL_TESTS = status=0; TRITON_INTERPRET=1 $(PYTEST) --dist load tests/kernels -m "not aot" $(1) || status=1; \
	$(PYTEST) --dist load tests/kernels -m aot $(1) || status=1
# With PYTEST_ARGS, which choose among the other tests, kernels are left out.
TESTS = $(if $(PYTEST_ARGS),status=0,$(KERNEL_TESTS)); $(PYTEST) --ignore=tests/kernels $(1) || status=1; exit $$status

.DEFAULT_GOAL := help
.PHONY: help setup gpu demo test test-full test-kernels fast bench check docs docs-reference format clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: ## Create .venv and install the locked dependencies (CPU)
	@$(SETUP)

gpu: ## Create .venv with vllm for NVIDIA GPUs instead
	@$(SETUP) gpu

demo: setup ## The main job, end to end, on the embedded model (minutes)
	@$(BIN)/preft demo

test: setup ## All tests, long property tests on seeded subsets
	@$(call TESTS)

test-full: setup ## All tests, long property tests whole
	@$(call TESTS,--full)

test-kernels: setup ## Kernels, interpreted and compiled, without a GPU (2 minutes)
	@$(call KERNEL_TESTS); exit $$status

fast: setup ## Tests without an engine or the embedded model (under 3 minutes)
	@$(PYTEST) --ignore=tests/kernels -m "not engine and not smollm2"

bench: setup ## The standing benchmark: 10 minutes on two quiet cores; rewrites its table in the README
	@$(BIN)/python benchmarks/standing.py

check: setup ## Formatting, lint, types, import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: setup docs-reference ## Build the documentation into build/site
	@$(BIN)/mkdocs build --strict --quiet

docs-reference: setup ## Write the generated pages of docs/reference
	@$(BIN)/python scripts/reference.py

format: setup ## Apply formatting and the lint fixes that are safe
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## Remove .venv, caches and build output
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
	rm -rf *.egg-info
