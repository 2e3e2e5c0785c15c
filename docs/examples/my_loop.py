"""A training loop of your own, in one process, on the parts of this project."""

from itertools import islice

import lockstep
from lockstep import build
from lockstep.build import preflight
from lockstep.distributed.world import join_world
from lockstep.training.evaluate import evaluate


def train_epoch(run, batches):
    run.strategy.module.train()
    for batch in islice(batches, run.steps_left):
        run.step(batch)
        run.progress.advance(batch)
    run.end_epoch()


config = lockstep.compose("model=mlp scheduler=constant trainer.epochs=3")
parts = preflight(config)
with join_world() as world:
    run = build.build_run(config, world, parts)
    batches = run.loaders.train.batches(run.progress)
    while not run.finished:
        train_epoch(run, batches)
        print(run.progress.epoch, evaluate(run, run.loaders.val))
