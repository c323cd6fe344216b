# `make demo` and `make test` do all their set-up on a fresh machine; a second run finds it done.
#
#   PYTHON=python3.12   interpreter for the virtual environment (3.10 to 3.13)
#   TORCH=...           requirement for torch, in place of the pinned one
#   VENV=dir            where the virtual environment lives

PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION := 2.13.0
# A CUDA build of torch brings its own Triton; beside a CPU build it interprets and compiles the kernels for the tests.
TRITON_VERSION := 3.6.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
ifeq ($(HAS_GPU),yes)
TORCH ?= torch==$(TORCH_VERSION)
else
TORCH ?= torch==$(TORCH_VERSION)+cpu
endif

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ENGINE_PACKAGES := $(VENV)/engines
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test lint types tables figures format clean contracts kernel

# A source file of the standard library that the embedded model was not trained on.
DEMO_MODULE ?= sched
demo: $(INSTALLED)
	$(BIN)/rankmoe generate --tokens 192 --batch 2 --ep 4 --verify \
		--prompt-file "$$($(BIN)/python -c "import $(DEMO_MODULE); print($(DEMO_MODULE).__file__)")"

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

# The tables of the documents, from the records in benchmarks/results.
tables: $(INSTALLED)
	$(BIN)/python benchmarks/tables.py

# The figures of the README, from the same records.
figures: $(INSTALLED)
	$(BIN)/python benchmarks/figures.py

# What the engines' adapters rely on, against the engines' published sources (some 190 MB, fetched once), and the
# adapters inside the engines themselves, a process each: an engine sets up its world when it is imported.
contracts: $(INSTALLED) $(ENGINE_PACKAGES)/.installed
	$(BIN)/python -m pytest contracts
	for file in contracts/run_*.py; do \
		ENGINE_PACKAGES=$(ENGINE_PACKAGES) $(BIN)/python -m pytest $$file || exit 1; \
	done

# Some 140 MB. Where no package index answers this is left undone, and the tests that need it say so as they skip.
$(ENGINE_PACKAGES)/.installed: contracts/requirements.txt $(INSTALLED)
	-$(PIP) --no-deps --upgrade --target $(ENGINE_PACKAGES) --requirement $< && touch $@

# The layout of a Hugging Face `kernels` repository, in build/torch-universal.
kernel: $(INSTALLED)
	$(BIN)/python tools/hub_kernel.py .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The CPU build of torch has its own index; where that cannot be reached or has no such build (macOS), PyPI's is taken.
$(INSTALLED): pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info[:2] else "rankmoe needs Python 3.10 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) and the development tools into $(VENV)"
	$(if $(findstring +cpu,$(TORCH)),$(PIP) --retries 1 --timeout 15 --extra-index-url $(CPU_INDEX) "$(TORCH)" || $(PIP) "$(subst +cpu,,$(TORCH))",$(PIP) "$(TORCH)")
	$(if $(filter Linux,$(shell uname -s)),$(if $(findstring +cpu,$(TORCH)),$(PIP) "triton==$(TRITON_VERSION)"))
	$(PIP) -e ".[dev]"
	@touch $(INSTALLED)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
