"""The wait for the first batch of an epoch, in steps: map-style data that workers read, 2 ms a sample.

python bench/epoch_gap.py
"""

import time
from functools import partial

import harness
import torch
from torch import Tensor

from lockstep.data.loader import BatchLoader, Converter
from lockstep.data.partition import micro_batch_parts

SAMPLES, BATCH, SECONDS_A_SAMPLE = 640, 32, 0.002
EPOCHS = 5
CASES = ((2, 0.04), (4, 0.02), (8, 0.01), (8, 0.03))  # (workers, seconds of a step)


class Slow(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(SECONDS_A_SAMPLE)
        return torch.zeros(3, 32, 32, dtype=torch.uint8), index % 10


def gaps(workers: int, step: float) -> list[float]:
    """From the end of each epoch's last step to the next one's first batch, in steps."""
    converter = Converter(torch.device("cpu"), torch.float32, torch.contiguous_format, [0.5], [0.5])
    loader = BatchLoader(Slow(), converter, workers=workers)
    parts = partial(micro_batch_parts, accumulation_steps=1, rank=0, size=1)
    found = []
    for epoch in range(EPOCHS):
        began = time.monotonic()
        batches = loader.epoch(epoch, BATCH, parts, last_epoch=EPOCHS - 1)
        next(batches)
        found.append((time.monotonic() - began) / step)
        time.sleep(step)
        for _ in batches:
            time.sleep(step)
    loader.close()
    return found[1:]


def main() -> None:
    harness.parse(harness.parser(__doc__, "epoch_gap"))
    rows = [[workers, f"{1000 * step:.0f}", harness.spread(gaps(workers, step))] for workers, step in CASES]
    print(harness.table(["workers", "ms a step", "first batch of an epoch, steps"], rows))


if __name__ == "__main__":
    main()
