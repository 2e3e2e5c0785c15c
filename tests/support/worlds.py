"""Functions in small gloo worlds of real processes."""

import multiprocessing
import os
import sys
import time
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import pytest

from support.commands import TIMEOUT
from support.ports import free_port

PRELOAD = """torch torch.distributed torch.nn.parallel torch.distributed.fsdp torch.distributed.pipelining hydra train
lockstep.build lockstep.training.loop lockstep.training.metrics lockstep.data.vision lockstep.loggers.tensorboard tqdm
lockstep.loggers.console lockstep.modes.train torch.utils.tensorboard pydantic.type_adapter safetensors.torch
support.models support.own_data support.reference support.configs support.worlds pytest zoneinfo PIL.Image"""


def in_world(size, function, *args, limit=TIMEOUT):
    """[function(*args) as rank r of a gloo world, for each r], in processes forked from a server that has torch loaded.

    They may take `limit` seconds together.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD.split())
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11 gives the server no sys.path
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        ensure_running()
    port, results = free_port(), context.SimpleQueue()
    shared = (size, port, results, function, args)
    processes = [context.Process(target=_rank, args=(rank, *shared)) for rank in range(size)]
    for process in processes:
        process.start()
    answers = {}
    deadline = time.monotonic() + limit
    try:
        while len(answers) < size:
            if not results.empty():
                answers.update([results.get()])
                continue
            failed = [process.exitcode for process in processes if process.exitcode]
            assert not failed, f"a rank ended with {failed[0]}"
            assert time.monotonic() < deadline, f"a world of {size} still ran after {limit} s"
            time.sleep(0.01)
        for process in processes:
            process.join(10)  # `make coverage` writes its data when a rank exits
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [answers[rank] for rank in range(size)]


def _rank(rank, size, port, results, function, args):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    results.put((rank, function(*args)))
    from lockstep.failures.report import leave

    leave()  # as launchers do
    os._exit(0)


def train(config):
    """A whole training in this rank, with its console output hidden. Returns the objective; where nothing is chosen,
    rank 0 returns that of the last weights on the test set."""
    from lockstep.distributed import world
    from lockstep.modes.train import Train
    from lockstep.runs.record import read_run
    from support.configs import parts_of, record_of

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    world.usable_cores = lambda: [0]  # one thread, as OMP_NUM_THREADS says to commands
    objective = Train().work(config, record_of(config), parts_of(config))
    if objective is None and os.environ["RANK"] == "0":
        objective = read_run(Path(config.run_dir))["objective"]["last"]
    return objective


def train_all(configs):
    return [train(config) for config in configs]


def delay_exchanges():
    """As on a GPU, what the ranks of this process tell each other is read at the next exchange."""
    from lockstep.training import exchange

    create = exchange.Exchange.__init__

    def delayed(self, *arguments, **options):
        create(self, *arguments, **options | {"delayed": True})

    exchange.LONG = float("inf")  # a slow machine reads at once
    exchange.Exchange.__init__ = delayed


def refusal(config):
    """The sentence with which a training is refused in this rank."""
    from lockstep.errors import ConfigError

    try:
        train(config)
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was not refused")


def refusals(configs):
    return [refusal(config) for config in configs]


def weights(folder):
    """All weights and buffers of a run's model.pt in one float64 vector."""
    import torch

    saved = torch.load(folder / "model.pt", weights_only=True)
    return torch.cat([value.double().flatten() for value in saved.values()])


def distance(one, other):
    return float((one - other).norm() / one.norm())


def same_bits(one, other):
    import torch

    first, second = (torch.load(folder / "model.pt", weights_only=True) for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
