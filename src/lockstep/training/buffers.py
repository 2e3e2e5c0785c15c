"""Buffers that a training step changes, on each rank from the samples of its share: running statistics, codebooks; and
frozen weights that it changes.

Batch norms have their own: `sync_bn` says what they see.
"""

import zlib

import torch
from torch import Tensor, nn

from lockstep.compat import versions
from lockstep.distributed.old_world import all_reduce_sums
from lockstep.distributed.sync_batch_norm import BatchNorm
from lockstep.errors import ConfigError, first_of
from lockstep.strategies.base import WATCHED_STEPS, Strategy

NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)  # those whose running statistics have a mean
ATTRIBUTE = "lockstep_buffers"
"""By this attribute, "mean" or "own", a module says what is done with its buffers, whatever trainer.buffers is."""
IN_A_BUFFER = "keep it in a buffer (self.register_buffer), and type trainer.buffers=mean"


class BuffersDiffer(ConfigError):
    """A step has made buffers differ between ranks, and nothing says what shall become of them."""


class Buffers:
    """In its first steps a process looks which buffers a step makes different on the ranks, and from then on averages
    those that may be averaged, weighted by the samples of the ranks. Without such buffers no step costs anything.

    For running means that is the value of one process. Whole numbers are taken from rank 0.

    policy: mean; own: each rank keeps its own, and a snapshot has those of rank 0; auto: averaged in torch's norms, and
        refused in other modules, of which only their author knows what they are.
    """

    def __init__(self, strategy: Strategy, policy: str) -> None:
        world = strategy.world
        self.strategy, self.world, self.policy = strategy, world, policy
        cuts_batches = strategy.own_epoch() is None and 1 < strategy.data_parallel_size(world.size) == world.size
        are_alike = strategy.ranks_agree or strategy.shards_state  # parts of weights differ, whole buffers do not
        self.is_watching, self.steps = cuts_batches and are_alike, set[int]()
        self.averaged: dict[str, tuple[nn.Module, str]] = {}  # {name: the module and its attribute}
        self.own = set[str]()
        self.has_replicas = not strategy.shards_state and bool(strategy.replicated_tensors())  # of weights, to the bit
        self.seen = self._versions() if self.is_watching else {}

    def after_pass(self, step: int, samples: int) -> None:
        """A collective. Raises ConfigError, on all ranks, see `policy`.

        samples: of this rank's share of a forward pass.
        """
        if self.is_watching:
            self.steps.add(step)
            self.is_watching = len(self.steps) <= WATCHED_STEPS
            if self.is_watching:
                self._watch(step)
        if self.averaged:
            self._average(samples)

    def _watched(self) -> dict[str, tuple[nn.Module, str]]:
        """Buffers but those of batch norms, and those whose fate is known; weights that are not trained."""
        watched = dict[str, tuple[nn.Module, str]]()
        for prefix, module in self.strategy.model.named_modules():
            names = [] if isinstance(module, BatchNorm) else [name for name, _ in module.named_buffers(recurse=False)]
            if self.has_replicas:
                names += [name for name, weight in module.named_parameters(recurse=False) if not weight.requires_grad]
            watched |= {f"{prefix}.{name}".lstrip("."): (module, name) for name in names}
        return {name: place for name, place in watched.items() if name not in self.averaged.keys() | self.own}

    def _versions(self) -> dict[str, tuple[int, int]]:
        """A buffer is changed in place, or another tensor takes its place."""
        found = {name: getattr(module, key) for name, (module, key) in self._watched().items()}
        return {name: (id(buffer), *versions([buffer])) for name, buffer in found.items()}  # type: ignore[misc]

    def _watch(self, step: int) -> None:
        now, watched = self._versions(), self._watched()
        if not (now or self.seen):  # all buffers are of batch norms, on all ranks
            return
        changed = {name: watched[name] for name, version in now.items() if self.seen.get(name) != version}
        self.seen = now
        mine = {}
        for name, (module, key) in changed.items():
            buffer = getattr(module, key)
            mine[name] = [list(buffer.shape), checksum(buffer)]
        ranks = self.world.all_gather_json(mine)
        names = dict.fromkeys(name for rank in ranks for name in rank)
        differing = [name for name in names if any(rank.get(name) != ranks[0].get(name) for rank in ranks)]
        unknown, unlike, weights = [], [], []
        for name in differing:
            module, key = watched[name]
            usual = "mean" if self.policy == "auto" and isinstance(module, NORMS) else self.policy
            policy = getattr(module, ATTRIBUTE, usual)
            if isinstance(getattr(module, key), nn.Parameter):
                weights.append(name)
            elif policy == "own":
                self.own.add(name)
            elif policy == "auto":
                unknown.append(name)
            elif any(name not in rank or rank[name][0] != ranks[0][name][0] for rank in ranks):
                unlike.append(name)
            else:
                self.averaged[name] = module, key
        if weights:
            raise BuffersDiffer(
                f"the forward pass changes the weight {first_of(weights)}, on each rank by its own share of the batch: "
                f"it differs between ranks after step {step}; {IN_A_BUFFER}"
            )
        if unknown:
            raise BuffersDiffer(
                f"the buffer {first_of(unknown)} differs between ranks after step {step}, as each rank has seen "
                f"its own share of the batch; type trainer.buffers=mean to average it over the ranks after each step, "
                f"which suits running statistics, or trainer.buffers=own to leave each rank its own"
            )
        if unlike:
            raise BuffersDiffer(
                f"the buffer {first_of(unlike)} has other shapes on other ranks after step {step}, and no mean; "
                f"type trainer.buffers=own to leave each rank its own, or gather the samples of all ranks in the module"
            )

    @torch.no_grad()
    def _average(self, samples: int) -> None:
        """All at once. In float64, which holds whole numbers up to 2**53."""
        buffers = [getattr(module, key) for module, key in self.averaged.values()]
        columns = [
            _as_numbers(buffer) * (samples if _has_mean(buffer) else self.world.is_rank_zero) for buffer in buffers
        ]
        weight = torch.full((1,), float(samples), dtype=torch.float64, device=self.world.device)
        *values, total = all_reduce_sums(self.world, [*columns, weight])
        for buffer, value in zip(buffers, values, strict=True):
            mean = value / total if _has_mean(buffer) else value
            shaped = torch.view_as_complex(mean.view(-1, 2)) if buffer.is_complex() else mean
            buffer.copy_(shaped.view(buffer.shape))


def _has_mean(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _as_numbers(buffer: Tensor) -> Tensor:
    """(values,) in float64."""
    return (torch.view_as_real(buffer) if buffer.is_complex() else buffer).reshape(-1).double()


def checksum(buffer: Tensor) -> int:
    dense = buffer.detach().to_dense() if buffer.is_sparse else buffer.detach()
    return zlib.crc32(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
