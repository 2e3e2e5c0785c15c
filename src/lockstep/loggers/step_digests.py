"""`trainer.digest`: every few steps a digest of the loss, of each gradient and of each weight, in digests.bin."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lockstep.loggers.base import Logger, RunInfo
from lockstep.loggers.csv_logger import append
from lockstep.runs.compare import DIGESTS, row_bytes, steps_of
from lockstep.training.state import TrainState
from lockstep.training.weight_check import digest

EVERY = 10  # steps, for trainer.digest=on
PENDING = 20  # rows in memory at most: reading one from a GPU waits for its step


class StepDigests(Logger):
    """On rank 0. The loss is that of its own samples. Gradients are averaged, and not clipped yet. Weights are those
    after the update, with the model's buffers.

    A resumed run goes on in the same file, behind the step that it resumed from. So does a run after a rollback.
    """

    def __init__(self, state: TrainState, every: int) -> None:
        self.state, self.every = state, every
        model = state.strategy.model
        self.parameters = dict(model.named_parameters())
        self.weights: dict[str, Tensor] = {**self.parameters, **dict(model.named_buffers())}
        self.names = ["loss", *(f"gradient of {name}" for name in self.parameters), *self.weights]
        self.header = f"{json.dumps({'names': self.names})}\n".encode()
        self.before: list[Tensor] = []  # digests of the loss and the gradients of a step whose update is to come
        self.rows: list[tuple[int, Tensor]] = []  # (step, digests), not in the file yet
        self.last_step = 0  # in the file

    def on_fit_start(self, run: RunInfo) -> None:
        self.path = run.run_dir / DIGESTS
        start = self.state.progress.step  # run.start_step may be earlier: other loggers get more
        if start == 0 or not _starts_with(self.path, self.header):
            self.path.write_bytes(self.header)
        self._drop_after(start)

    def on_gradients_ready(self) -> None:
        step = self.state.progress.step + 1
        self.before = []
        if step % self.every == 0:
            gradients = [parameter.grad for parameter in self.parameters.values()]
            self.before = [self._loss(step), *map(self._digest, gradients)]

    def on_step(self, step: int, samples: int) -> None:
        if not self.before:
            return
        row = torch.stack([*self.before, *map(self._digest, self.weights.values())])
        self.before = []
        self.rows = [(number, digests) for number, digests in self.rows if number < step]  # after a rollback
        self.rows.append((step, row))
        if len(self.rows) >= PENDING:
            self.flush()

    def flush(self) -> None:
        if not self.rows:
            return
        if not self.path.exists():  # the run folder was deleted or moved away
            self.path.write_bytes(self.header)
        if self.rows[0][0] <= self.last_step:  # after a rollback
            self._drop_after(self.rows[0][0] - 1)
        table = torch.stack([row for _, row in self.rows]).cpu()
        steps = torch.tensor([[step] for step, _ in self.rows])
        append(self.path, torch.cat([steps, table], dim=1).numpy().tobytes())
        self.last_step, self.rows = self.rows[-1][0], []

    def close(self) -> None:
        self.flush()

    def _digest(self, tensor: Tensor | None) -> Tensor:
        device = self.state.strategy.world.device
        if tensor is None:
            return torch.zeros((), dtype=torch.int64, device=device)
        return digest(in_memory_order(tensor)).to(device)

    def _loss(self, step: int) -> Tensor:
        losses: Sequence[Tensor] = [loss for number, loss in self.state.meter.recent_losses if number == step]
        return self._digest(torch.stack(list(losses)) if losses else None)

    def _drop_after(self, step: int) -> None:
        """Keep the whole rows of the file up to `step`."""
        steps = steps_of(self.path)
        kept = [number for number in steps if number <= step]
        with open(self.path, "r+b") as file:
            header = file.readline()
            file.truncate(len(header) + len(kept) * row_bytes(len(self.names)))
        self.last_step = kept[-1] if kept else 0


def in_memory_order(tensor: Tensor) -> Tensor:
    """A contiguous view of a channels_last tensor (N, C, H, W): copying one takes twice as long as its digest."""
    is_channels_last = tensor.dim() == 4 and not tensor.is_contiguous()
    is_dense = is_channels_last and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.permute(0, 2, 3, 1) if is_dense else tensor


def _starts_with(path: Path, header: bytes) -> bool:
    if not path.exists():
        return False
    with open(path, "rb") as file:
        return file.readline() == header
