# make demo   train and evaluate an SMoE on the built-in corpus
# make test   run the tests, in 5 to 12 minutes on two cores
# make soak   run the long tests: kills, more settings, real launchers, in 11 to 23 minutes
# make lint   check format and style
# make docs   write the site of docs/ to build/site
# make matrix run the tests with other versions of torch and Python: docs/compatibility.md
# make bench  measure speed and memory, also of other packages' layers: benchmarks/results/report.md
# make gpu-check  check a GPU's results and speed, within 9 minutes: docs/performance.md
# make setup  make the environment in .venv, as the other targets but matrix do if necessary
# Variables: PYTHON (interpreter for .venv, 3.11 or later), JOBS (test processes),
#   KEEP_TORCH=1 (.venv uses the torch and other packages of PYTHON),
#   ONLY and PYTHONS (environments of the matrix, and its Pythons that are not in PATH),
#   BENCH (flags of both benchmarks/block.py and program.py: make bench BENCH=--quick),
#   CHECK (flags of benchmarks/gpu: make gpu-check CHECK='--device cpu --minutes 2').

SHELL := /bin/bash -o pipefail
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
DONE := $(VENV)/setup-done
RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

# Show only pip's large downloads and slow steps; the log has the whole output.
LOG := $(VENV)/setup.log
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --progress-bar off
SHOW := 2>&1 | tee -a $(LOG) | \
    sed -unE -e 's/^ *(Downloading) ([^ ]+) (\([0-9]{3,}[.0-9]* MB\)|\([.0-9]+ GB\)).*/    \1 \2 \3/p' \
    -e 's/^(Building) wheels? for .*: /    \1 /p' -e 's/^(Installing) collected packages.*/    \1 them/p'
failed = { tail -n 15 $(LOG); echo "error: $(1); the log is $(LOG)"; exit 1; }

override KEEP_TORCH := $(filter-out 0,$(KEEP_TORCH))
# An existing .venv would ignore it.
ifneq ($(KEEP_TORCH),)
ifneq ($(shell grep -s 'include-system-site-packages = false' $(VENV)/pyvenv.cfg),)
$(error KEEP_TORCH=1: $(VENV) has its own torch; remove $(VENV) first)
endif
endif

# The packages that the benchmarks compare with have their own environment.
BENCH ?=
BENCH_VENV := .venv-bench
BENCH_PIP := $(BENCH_VENV)/bin/python -m pip --disable-pip-version-check install --progress-bar off \
    -c $(BENCH_VENV)/constraints.txt
BENCH_RUN := LOGLEVEL=WARNING PYTHONWARNINGS=ignore

# Each process imports all tests, so keep their bytecode even if the environment says otherwise.
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 python -m pytest --dist loadfile --no-loadscope-reorder

.PHONY: demo test soak lint docs matrix bench gpu-check setup
demo: $(DONE)
	@$(RUN) bash scripts/demo.sh

test: $(DONE)
	@echo "The tests, in $(JOBS) processes: 5 to 12 minutes on two cores"
	@$(RUN) $(TEST) -n $(JOBS)

soak: $(DONE)
	@echo "The long tests, in $(JOBS) processes: 11 to 23 minutes on two cores"
	@$(RUN) $(TEST) -m soak -n $(JOBS)

lint: $(DONE)
	@$(RUN) ruff format --check .
	@$(RUN) ruff check .

docs: $(DONE)
	@$(RUN) NO_MKDOCS_2_WARNING=1 mkdocs build --strict

matrix:
	@$(PYTHON) tests/matrix.py --jobs $(JOBS) $(PYTHONS:%=--python %) $(ONLY)

bench: $(DONE) $(BENCH_VENV)/setup-done
	@$(BENCH_RUN) $(BENCH_VENV)/bin/python -m benchmarks.block $(BENCH)
	@$(BENCH_RUN) $(VENV)/bin/python -m benchmarks.program $(BENCH)
	@$(BENCH_RUN) $(VENV)/bin/python -m benchmarks.report

CHECK ?= --minutes 9
gpu-check: $(DONE)
	@$(RUN) PYTHONWARNINGS=ignore python -m benchmarks.gpu $(CHECK)

# The report says if a package could not be installed.
$(BENCH_VENV)/setup-done: benchmarks/requirements.txt setup.py pyproject.toml constraints.txt Makefile | $(DONE)
	@echo "The packages to compare with, in $(BENCH_VENV)"
	@$(VENV)/bin/python -m venv $(BENCH_VENV)
	@grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > $(BENCH_VENV)/constraints.txt
	@$(BENCH_PIP) -q -e .
	@$(BENCH_PIP) -q --no-deps fairseq==0.12.2
	@grep '^[a-z]' benchmarks/requirements.txt | while read -r package; do \
	    $(BENCH_PIP) -q "$$package" || echo "$$package was not installed"; done
	@touch $@

setup: $(DONE)

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || \
	    { echo "error: $(PYTHON) is not Python 3.11 or later; name one that is: make PYTHON=/path/to/python3.11"; \
	      exit 1; }
	@echo "[1/3] A Python environment in $(VENV)"
	@$(PYTHON) -m venv $(if $(KEEP_TORCH),--system-site-packages) $(VENV) || \
	    { echo "error: $(PYTHON) cannot make a virtual environment: install its venv package (Debian: apt install python3-venv)"; \
	      exit 1; }
	@test -z "$(KEEP_TORCH)" || $(VENV)/bin/python -c 'import torch' 2> /dev/null || \
	    { rm -r $(VENV); echo "error: $(PYTHON) has no torch to keep, or is itself a virtual environment;" \
	      "install into that one as the README says"; exit 1; }

# fairseq is installed with --no-deps, for the reason in setup.py; its C++ code is compiled here.
$(DONE): setup.py pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "[2/3] torch and the other packages, with smoe_fairseq, in some minutes; the log is $(LOG)"
	@$(PIP) $(if $(KEEP_TORCH),,-c constraints.txt) -e '.[dev,dev-huggingface,analysis,export,huggingface,serve]' $(SHOW) || \
	    $(call failed,the packages were not installed)
	@echo "[3/3] fairseq 0.12.2, compiled in about half a minute"
	@$(PIP) --no-deps fairseq==0.12.2 $(SHOW) || \
	    $(call failed,fairseq 0.12.2 was not installed; it takes a C++ compiler and Python's headers \
	    (Debian: apt install build-essential python3-dev))
	@touch $@
