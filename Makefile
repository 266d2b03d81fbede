# Everything a fresh clone needs is Python 3.11+ and make: each target sets .venv up first (at once when it is current).
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu test-harness test-trl test-engines test-nixl test-deepspeed sim lint fix gen gen-check bench lock clean

BIN := .venv/bin

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup:  ## Create or complete .venv (GYRE_TORCH=cuda for GPU machines, PYTHON=... to choose the interpreter)
	@sh tools/setup.sh

demo: setup  ## Train the example policy with every service as its own process (ARGS="..." goes to `gyre demo`)
	@$(BIN)/gyre demo examples/clinic/clinic.toml $(ARGS)

test: lint gen-check  ## Lint, check generated code, run every test that needs nothing else (ARGS="-k name")
	@$(BIN)/python -m pytest -m "not harness and not engines" $(ARGS)

sim: setup  ## Simulate the whole protocol under faults: make sim SEEDS=300 FIRST=0 (ARGS="--keep-going --story FILE")
	@PYTHONPATH=tests $(BIN)/python -m sim.run --seeds $(or $(SEEDS),300) --first $(or $(FIRST),0) $(ARGS)

test-gpu: setup  ## One GPU, at most 8 minutes: contract, mismatch, speeds, role switch (ARGS="--engine vllm" for another engine)
	@$(BIN)/python bench/gpu.py --check
	@GYRE_TEST_DEVICE=cuda timeout 120 $(BIN)/python -m pytest tests/unit/rollout/test_engine_conformance.py -k torch
	@timeout 360 $(BIN)/python bench/gpu.py $(ARGS)

test-harness: setup  ## Run the tests that drive a real third-party harness, installed apart in .venv-harness
	@sh tools/setup_harness.sh
	@GYRE_TEST_HARNESS_BIN='$(CURDIR)/.venv-harness/bin' $(BIN)/python -m pytest -m harness $(ARGS)

test-trl: setup  ## Compare the losses with those of TRL, installed apart in .venv-trl
	@sh tools/setup_trl.sh
	@PYTHONPATH=libs/contracts/src:libs/runtime/src:services/trainer/src .venv-trl/bin/python -m pytest -s \
		--override-ini=addopts= --import-mode=importlib --disable-warnings --confcutdir=tests/optional tests/optional/test_trl_losses.py $(ARGS)

test-engines: setup  ## Drive a real vLLM (its CPU build, two servers), installed apart in .venv-vllm: some minutes, 3.5 GB
	@sh tools/setup_vllm.sh
	@GYRE_VLLM_PYTHON='$(CURDIR)/.venv-vllm/bin/python' $(BIN)/python -m pytest -s -m engines tests/engines $(ARGS)

test-nixl: setup  ## Run the transfer tests over the real NIXL too, installed apart in .venv-nixl (Linux)
	@sh tools/setup_nixl.sh
	@NIXL_LOG_LEVEL=WARN .venv-nixl/bin/python -m pytest -s tests/unit/transfer tests/integration/test_transfer_processes.py $(ARGS)
	@PATH="$(CURDIR)/$(BIN):$$PATH" .venv-nixl/bin/python -m pytest tests/integration/test_mid_step_join.py -k nixl $(ARGS)

test-deepspeed: setup  ## Run the tests of the DeepSpeed backend, with DeepSpeed installed apart in .venv-deepspeed
	@sh tools/setup_deepspeed.sh
	@PATH="$(CURDIR)/.venv/bin:$$PATH" .venv-deepspeed/bin/python -m pytest tests/unit/trainer/test_ranks.py \
		tests/unit/trainer/test_rank_ways.py tests/integration/test_workers_of_ranks.py -k deepspeed $(ARGS)

lint: setup  ## Check style
	@$(BIN)/ruff check --quiet .

fix: setup  ## Repair what ruff can repair itself
	@$(BIN)/ruff check --quiet --fix .

gen: setup  ## Generate the gRPC code from proto/
	@$(BIN)/python tools/gen_proto.py

gen-check: setup  ## Check that the generated gRPC code is current
	@$(BIN)/python tools/gen_proto.py --check

bench: setup  ## Run one benchmark: make bench NAME=... ARGS="..."
	@if [ -f 'bench/$(NAME).py' ]; then exec $(BIN)/python 'bench/$(NAME).py' $(ARGS); fi; \
	echo 'make bench NAME=..., one of:'; ls bench/*.py 2>/dev/null | sed 's|bench/\(.*\)\.py|  \1|'; exit 2

lock: setup  ## Write constraints.txt anew: the newest versions the packages' ranges allow
	@sh tools/lock.sh

clean:  ## Remove caches and build products (.venv and runs/ stay)
	@find . \( -name .venv -o -name '.venv-*' -o -name .git \) -prune -o -name __pycache__ -type d -print | xargs rm -rf
	@rm -rf .pytest_cache .ruff_cache .hypothesis build dist
