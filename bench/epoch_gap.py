"""The wait for the first batch of an epoch, in steps: map-style data that workers read, 2 ms a sample.

python bench/epoch_gap.py
"""

import time
from itertools import islice

import harness
import torch
from torch import Tensor

from lockstep.data.loader import InputConverter, Loader
from lockstep.data.partition import Order, Part
from lockstep.data.reader import SampleReader

SAMPLES, BATCH, SECONDS_A_SAMPLE = 640, 32, 0.002
EPOCHS = 5
CASES = ((2, 0.04), (4, 0.02), (8, 0.01), (8, 0.03))  # (workers, seconds of a step)


class Slow(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(SECONDS_A_SAMPLE)
        return torch.zeros(3, 32, 32, dtype=torch.uint8), index % 10


class Start:
    """The position of a training that begins."""

    epoch, samples = 0, 0


def whole(number: int, count: int) -> list[Part]:
    return [Part(0, 0, count)]


def gaps(workers: int, step: float) -> list[float]:
    """From the end of each epoch's last step to the next one's first batch, in steps."""
    reader, converter = (
        SampleReader(Slow(), "training data", seed=0),
        InputConverter(torch.float32, mean=[0.5], std=[0.5]),
    )
    loader = Loader(reader, Order(SAMPLES, 0), converter, torch.device("cpu"), 0, BATCH, whole, workers=workers)
    batches, found = loader.batches(Start()), []
    for _ in range(EPOCHS):
        began = time.monotonic()
        next(batches)
        found.append((time.monotonic() - began) / step)
        time.sleep(step)
        for _ in islice(batches, SAMPLES // BATCH - 1):
            time.sleep(step)
    return found[1:]


def main() -> None:
    harness.parse(harness.parser(__doc__, "epoch_gap"))
    rows = [[workers, f"{1000 * step:.0f}", harness.spread(gaps(workers, step))] for workers, step in CASES]
    print(harness.table(["workers", "ms a step", "first batch of an epoch, steps"], rows))


if __name__ == "__main__":
    main()
