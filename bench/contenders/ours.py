"""Lockstep under the clock: what its config calls `loop` here, and the first images of MNIST.

python src/train.py loop._target_=ours.train dataset.train._target_=ours.part_of_mnist +dataset.train.samples=15360 ...
"""

import course

from lockstep import datasets, loop

record, evaluate = course.Record(), loop.evaluate


def train(run, loader, after_step):
    record.start()
    figures = loop.train(run, loader, [record.stepped, *after_step])
    record.lap("training", len(loader))
    return figures


def timed(run, loader):
    record.start()
    means = evaluate(run, loader)
    record.lap("evaluation", len(loader))
    record.write(means["accuracy"])  # after every epoch: a rank of Lockstep leaves without Python's atexit
    return means


loop.evaluate = timed


def part_of_mnist(samples, **options):
    whole = datasets.mnist(**options)
    return type(whole)(*(tensor[:samples] for tensor in whole))
