# Lockstep. `make help` lists the targets; N is the number of ranks, ARGS any overrides.
N ?= 2
ARGS ?=
VENV ?= .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help train ddp sweep bench bench-gpu compare growth scaling board test drill promise lint clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo 'Set N=4 for four ranks and ARGS="trainer.epochs=10 optimizer=adamw" for overrides.'

$(READY): requirements.txt requirements-bench.txt requirements-dev.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

train: $(READY) ## train the convnet on the digits, N ranks over gloo
	$(PYTHON) src/train.py launch=torchrun launch.nproc_per_node=$(N) backend=gloo sync_bn=on $(ARGS)

ddp: $(READY) ## the same by torchrun from outside
	$(VENV)/bin/torchrun --standalone --nproc_per_node=$(N) src/train.py sync_bn=on $(ARGS)

sweep: $(READY) ## a sweep over learning rates, N ranks a job
	$(PYTHON) src/train.py -m launch=torchrun launch.nproc_per_node=$(N) sync_bn=on optimizer.lr=0.1,0.05,0.01 $(ARGS)

bench: $(READY) ## ratios against tutorials, Lightning, Accelerate, bare loops (ARGS=--quick)
	$(PYTHON) bench/race.py $(ARGS)

compare: $(READY) ## what each way of averaging gradients costs: a table and a plot
	$(PYTHON) bench/compare.py $(ARGS)

bench-gpu: $(READY) ## one GPU: MNIST to 99 %, throughput and what share of the card that is; ARGS=--write keeps it
	$(PYTHON) bench/gpu.py $(ARGS)

growth: $(READY) ## what a unit of work costs as the work grows: a table and a plot
	$(PYTHON) bench/growth.py $(ARGS)

scaling: $(READY) ## step times on up to 4096 ranks: fitted and checked here, predicted beyond
	$(PYTHON) bench/scaling.py $(ARGS)

board: $(READY) ## TensorBoard over all runs
	$(VENV)/bin/tensorboard --logdir outputs

lint: $(READY) ## ruff: style and format
	$(VENV)/bin/ruff check src tests bench
	$(VENV)/bin/ruff format --check src tests bench

test: $(READY) lint ## lint, then every test
	$(PYTHON) -m pytest -q $(ARGS)

drill: $(READY) ## the long drills: kills, elastic worlds, clusters on this machine
	$(PYTHON) -m pytest -q -m drill $(ARGS)

promise: $(READY) ## a table: the same numbers on 1, 2, 3, 4 and 8 ranks, by every starter
	PYTHONPATH=src $(PYTHON) tests/promise.py

clean: ## remove the virtual environment and the caches; runs in outputs/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -exec rm -rf {} +
