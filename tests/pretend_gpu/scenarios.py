"""A training of the project's own worker on pretended GPUs, and the same one on the CPU."""

import os
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pretend_gpu import device
from support.configs import record_of
from support.worlds import train

GPUS = 8


def trained_on_gpus(cfg: Any, gpus: int = GPUS, of: str = "cuda") -> dict[str, Any]:
    """{"error": "file:line Error: words" of what has failed, "waits": {place: of the host in a step, after the first
    one}, "collectives", "products", "weights_moved": as `device.Seen` has them}."""
    from lockstep.data.loader import BatchLoader
    from lockstep.training import loop

    device.pretend(gpus, "gloo" if of == "mps" else cfg.backend.name, of)
    epoch, train_epoch, steps, error = BatchLoader.epoch, loop.train_epoch, 0, ""

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal steps
        for number, batch in enumerate(epoch(*args, **options)):
            device.seen.counting = number > 0
            steps += number > 0
            yield batch

    def watched(*args: Any) -> int:
        with ExitStack() as stack:
            stack.callback(setattr, device.seen, "counting", False)
            return train_epoch(*args)

    BatchLoader.epoch, loop.train_epoch = counted, watched  # type: ignore[method-assign]
    try:
        train(cfg)
    except BaseException as raised:
        frames = [f for f in traceback.extract_tb(raised.__traceback__) if "/src/lockstep/" in f.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} " if frames else ""
        error = f"{place}{type(raised).__name__}: {str(raised)[:300]}"
        traceback.print_exc()
    seen = device.seen
    waits = {place: round(count / max(1, steps), 2) for place, count in seen.waits.items()}
    as_seen = {"collectives": seen.collectives, "products": dict(seen.products), "weights_moved": seen.weights_moved}
    return {"error": error, "waits": waits} | as_seen


def worked(cfg: Any, gpus: int, of: str = "cuda") -> None:
    """What the mode of a command does, on pretended GPUs, or on the CPU if there are none."""
    from lockstep.config.targets import instantiate_as
    from lockstep.modes.base import Mode

    if gpus:
        device.pretend(gpus, "gloo" if of == "mps" else cfg.backend.name, of)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    instantiate_as(Mode, cfg.mode, "mode").work(cfg, record_of(cfg))
