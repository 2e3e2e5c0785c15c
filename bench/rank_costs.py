"""What a rank returns of its training: run by `harness.in_ranks` in every rank of a fresh world."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any


def train_costs(config: Any) -> dict[str, Any]:
    """A whole training, with the callback of bench/measured.py.

    walls, cpus: seconds of each step after the second, by the clock and of CPU. first: seconds to the end of the first
    step. loss: the objective. laps: of the epochs' training. step_count: steps. state: MB of weights and optimizer
    state on this rank. The rest is memory at the end, see bench/record.py.
    """
    from measured import RECORD
    from record import memory
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from support.worlds import train

    optimizers: list[Any] = []
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: optimizers or optimizers.append(optimizer))
    began = time.time()
    loss = train(config)
    pairs = list(itertools.pairwise(RECORD.steps[2:]))
    return {
        "walls": [late[0] - early[0] for early, late in pairs],
        "cpus": [late[1] - early[1] for early, late in pairs],
        "first": (RECORD.first_step or began) - began,
        "loss": loss,
        "laps": RECORD.laps["training"],
        "step_count": len(RECORD.steps),
        "state": state_bytes(optimizers[0]) / 1e6 if optimizers else 0.0,
        **memory(),
    }


def pinned_train_costs(config: Any) -> dict[str, Any]:
    """`train_costs` on a core of this rank's own, as far as there are enough."""
    from harness import pin_to_core

    pin_to_core()
    return train_costs(config)


def state_bytes(optimizer: Any) -> int:
    """Bytes of an optimizer's parameters and state on this rank."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    held = [*weights, *(value for state in optimizer.state.values() for value in state.values())]
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in held)


@contextmanager
def built(config: Any) -> Iterator[tuple[Any, Any]]:
    """(run, snapshots) of a training without loggers."""
    from lockstep import build
    from lockstep.distributed.world import join_world
    from support.configs import parts_of, record_of

    parts, record = parts_of(config), record_of(config)
    with join_world(**vars(config.backend)) as world:
        run = build.build_run(config, world, parts)
        with build.snapshots(record, run) as snapshots:
            yield run, snapshots


def train_an_epoch(run: Any, snapshots: Any) -> None:
    from lockstep.loggers.base import Loggers
    from lockstep.training.exchange import Exchange
    from lockstep.training.loop import begin_epoch, end_epoch

    exchange = Exchange(run, Loggers([]), snapshots, delayed=False)
    begin_epoch(run, exchange)
    for batch in islice(run.loaders.train.batches(run.progress), run.steps_left):
        run.step(batch)
        run.progress.advance(batch)
        if run.progress.step >= exchange.due:
            exchange()
    end_epoch(run, exchange)


def snapshot_costs(config: Any) -> dict[str, float]:
    """Of the cheapest of three snapshots: CPU seconds in the training thread, seconds until it is written, and MB."""
    from harness import pin_to_core

    pin_to_core()
    copying, writing = [], []
    with built(config) as (run, snapshots):
        train_an_epoch(run, snapshots)
        for _ in range(4):
            began, busy = time.perf_counter(), time.thread_time()
            snapshots.save()
            copying.append(time.thread_time() - busy)
            snapshots.newest()  # waits
            writing.append(time.perf_counter() - began)
    size = max(path.stat().st_size for path in Path(config.run_dir).glob("snapshots/*/state.pt"))
    # Not the first one: what new memory costs, which no process has used before, depends on the machine.
    return {"copying": min(copying[1:]), "writing": min(writing[1:]), "MB": size / 1e6}
