"""Models of a user that run out of memory, on purpose or for real, or that draw and count in their forward pass."""

import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn


class Drawing(nn.Module):
    """Two blocks that draw from torch and numpy, and that count their passes. (N, ...) -> (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Noisy(64, 32), _Noisy(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(x.flatten(1)))
        return outputs


class _Noisy(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        scale = 1 + 0.1 * float(np.random.rand()) * torch.cos(self.passes)
        dropped: Tensor = nn.functional.dropout(self.norm(self.linear(x)).tanh() * scale, 0.2, self.training)
        return dropped


class RunsOut(nn.Module):
    """Raises CUDA's error of lacking memory in a training pass. Counts its samples in a buffer. (N, ...) -> (N, 10).

    fails: rows of a rank, the number of its pass, and whether the backward pass fails in place of the forward pass.
    """

    def __init__(self, fails: list[tuple[int, int, bool]]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))
        self.fails, self.passes = [tuple(fail) for fail in fails], 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.samples += len(x)
        rank = dist.get_rank()
        hidden = self.first(x.flatten(1)).tanh()
        if self.training and (rank, self.passes, False) in self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if self.training and (rank, self.passes, True) in self.fails:
            hidden.register_hook(_fail)
        outputs: Tensor = self.second(nn.functional.dropout(hidden, 0.2, self.training))
        return outputs


def _fail(gradient: Tensor) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


class Wide(nn.Module):
    """Needs 16 MB a sample, in a process that may take `megabytes` more than it had in its first pass."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 10), nn.Linear(64, 10)
        self.megabytes = megabytes

    def forward(self, x: Tensor) -> Tensor:
        limit, most = resource.getrlimit(resource.RLIMIT_DATA)  # not of addresses, of which each thread reserves many
        if limit == most and self.training:
            (used,) = re.findall(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
            resource.setrlimit(resource.RLIMIT_DATA, (int(used) * 2**10 + self.megabytes * 2**20, most))
        flat = x.flatten(1)
        wide = flat.repeat(1, 2**16)  # (N, 4 Mi) float32
        outputs: Tensor = self.first(flat) + self.second(wide.view(len(x), -1, 64).mean(1))
        return outputs
