# Lockstep. `make help` lists the targets. N is the number of ranks, ARGS any overrides or flags.
N ?= 2
FUZZ ?= 2000
ZOO ?= 700
ARGS ?=
VENV ?= .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip install --quiet --disable-pip-version-check
# One stamp for each file of requirements that is installed.
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
BENCH := $(VENV)/.ready-bench
# Tests of whole commands wait for two fifths of their time, and drills for half of it: four or five at once keep two cores
# busy. The longest files come first.
WHOLE := -n 4 --dist loadfile --no-loadscope-reorder
DRILLS := -n 5 --dist loadfile --no-loadscope-reorder
MINE := src/mine.py conf/model/mine.yaml tests/test_mine.py

.DEFAULT_GOAL := help
.PHONY: help train ddp mine sweep runs bench gpu gpu-wheels compare growth scaling board lint test-fast test tests drill matrices faults fuzz promise zoo screenshots coverage clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo 'Set N=4 for four ranks and ARGS="trainer.epochs=10 optimizer=adamw" for overrides.'

$(PYTHON):
	@python3 -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "Lockstep needs Python 3.11 to 3.13")'
	python3 -m venv $(VENV)

$(READY): requirements.txt | $(PYTHON)
	$(PIP) -r requirements.txt
	touch $@

$(DEV): requirements-dev.txt $(READY)
	$(PIP) -r requirements-dev.txt
	touch $@

$(BENCH): requirements-bench.txt $(READY)
	$(PIP) -r requirements-bench.txt
	touch $@

train: $(READY) ## train the convnet on the digits, N ranks over gloo
	$(PYTHON) src/train.py launch=torchrun launch.nproc_per_node=$(N) backend=gloo $(ARGS)

ddp: $(READY) ## the same training, started by torchrun
	$(VENV)/bin/torchrun --standalone --nproc_per_node=$(N) src/train.py backend=gloo $(ARGS)

mine: ## a net of your own to begin with: src/mine.py, conf/model/mine.yaml and a test of them
	@for file in $(MINE); do ! test -e $$file || { echo "$$file is there already; move it, then type make mine" >&2; exit 1; }; done
	@for file in $(MINE); do cp deploy/mine/$$(basename $$file) $$file; done
	@echo 'To train it, type python src/train.py model=mine'

sweep: $(READY) ## a sweep over learning rates, N ranks a job
	$(PYTHON) src/train.py -m launch=torchrun launch.nproc_per_node=$(N) optimizer.lr=0.1,0.05,0.01 $(ARGS)

runs: $(READY) ## a table of the runs in outputs/ (ARGS="--sort objective")
	$(PYTHON) src/runs.py table $(ARGS)

bench: $(BENCH) ## ratios against tutorials, Lightning, Accelerate and bare loops (ARGS=--quick)
	$(PYTHON) bench/race.py $(ARGS)

gpu: $(DEV) $(BENCH) ## one GPU, 9 minutes: its tests, then its speeds, which go into bench/RESULTS.md
	PYTHONPATH="$(CURDIR)/build/gpu$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) bench/gpu.py --all $(ARGS)

gpu-wheels: ## in build/gpu, what `make gpu DEV= BENCH= PYTHON=python3` needs where torch is and pip is not
	rm -rf build/wheels build/gpu
	python3 -m pip wheel --quiet --disable-pip-version-check --no-deps -w build/wheels -c requirements.txt hydra-core omegaconf antlr4-python3-runtime==4.9.3
	python3 -m pip wheel --quiet --disable-pip-version-check -w build/wheels -c requirements.txt pydantic annotated-types
	for wheel in build/wheels/*.whl; do python3 -m zipfile -e $$wheel build/gpu || exit; done

compare: $(BENCH) ## what each way of averaging gradients costs: a table
	$(PYTHON) bench/costs.py --only=gradient_sync $(ARGS)

growth: $(BENCH) ## what a unit of work costs as the work grows: a table
	$(PYTHON) bench/growth.py $(ARGS)

scaling: $(READY) ## step times on up to 4096 ranks, by formulas
	$(PYTHON) bench/scaling.py $(ARGS)

board: $(READY) ## TensorBoard over all runs
	$(VENV)/bin/tensorboard --logdir outputs

lint: $(DEV) ## ruff and mypy: style, format, types
	$(VENV)/bin/ruff check src tests bench docs/examples
	$(VENV)/bin/ruff format --check src tests bench docs/examples
	$(VENV)/bin/mypy

test-fast: lint ## lint, then the tests that take seconds
	$(PYTHON) -m pytest -q -n 2 --dist loadfile tests/fast $(ARGS)

test: lint tests ## lint, then all tests but the drills; with -j2 beside them

tests: $(DEV)
	$(PYTHON) -m pytest -q $(WHOLE) tests/runs tests/pretend_gpu tests/fast $(ARGS)

screenshots: $(DEV) ## the images of TensorBoard in docs/, from real runs; needs chromium
	LOCKSTEP_SCREENSHOTS=docs $(PYTHON) -m pytest -q -m drill tests/drills/test_dashboards.py

drill: $(DEV) ## the long drills
	$(PYTHON) -m pytest -q $(DRILLS) -m drill tests/drills tests/runs $(ARGS)

matrices: $(DEV) ## every fault under every launcher, every hang, every signal at every moment, 20 kills, all nets, each contender
	FAULTS=all LOCKSTEP_HANGS=all LOCKSTEP_SIGNALS=all LOCKSTEP_KILLS=20 LOCKSTEP_NETS=all LOCKSTEP_BENCH=all $(PYTHON) -m pytest -q $(DRILLS) -m drill tests/drills/test_faults.py tests/drills/test_hangs.py tests/drills/test_signals.py tests/drills/test_sharded_kills.py tests/drills/test_library_models.py tests/drills/test_check_nets.py tests/drills/test_presets.py tests/drills/test_bench.py $(ARGS)

faults: $(DEV) ## what is broken on purpose
	$(PYTHON) -m pytest -q $(DRILLS) -m fault tests $(ARGS)

fuzz: $(DEV) ## made-up commands with a new seed each time (FUZZ=2000): a run or one sentence
	LOCKSTEP_FUZZ_EXAMPLES=$(FUZZ) $(PYTHON) -m pytest -q -m drill tests/drills/test_fuzz.py $(ARGS)

promise: $(DEV) ## a table: the same numbers on 1, 2, 3, 4 and 8 ranks, by every launcher
	PYTHONPATH=src:tests $(PYTHON) -m support.promise $(ARGS)

zoo: $(DEV) ## what people bring in many combinations, each compared with plain torch (ZOO=700 drawn ones more)
	PYTHONPATH=src:tests $(PYTHON) -m zoo.combinations $(ZOO) $(ARGS)

coverage: $(DEV) ## the share of lines that the tests run, ranks included
	$(PYTHON) -m coverage erase
	-$(PYTHON) -m coverage run -m pytest -q $(WHOLE) tests/runs tests/pretend_gpu tests/fast $(ARGS)
	$(PYTHON) -m coverage combine --quiet
	$(PYTHON) -m coverage report

clean: ## remove the virtual environment and the caches; runs in outputs/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .coverage .coverage.*
	find src tests bench -name __pycache__ -type d -exec rm -rf {} +
