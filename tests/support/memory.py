"""Models of a user that run out of memory, or that draw and count in their forward pass."""

import re
import resource
from pathlib import Path

import numpy as np
import torch
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
