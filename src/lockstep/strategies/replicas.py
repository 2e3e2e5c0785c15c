"""`strategy.replicas`: groups of neighbouring ranks that hold a model together, beside others that hold its copies."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.world import World
from lockstep.errors import ConfigError


def validate_replicas(strategy: str, replicas: int, world_size: int) -> None:
    """Raise ConfigError if `world_size` ranks cannot form `replicas` groups of two or more. strategy: as typed."""
    if world_size % replicas or world_size == replicas > 1:
        raise ConfigError(
            f"{strategy} cannot make {replicas} groups of two or more of {world_size} ranks; "
            f"type strategy.replicas=1, or strategy=ddp"
        )


def replica_groups(replicas: int, world: World) -> tuple[Tensor, dist.ProcessGroup, dist.ProcessGroup]:
    """(ranks, the group that shares this rank's model, the group that holds what this rank holds). A collective.

    ranks: (replicas, ranks of a group). Neighbours share a model: they are the likeliest to be on one machine.
    """
    ranks = torch.arange(world.size).view(replicas, -1)
    return ranks, _own_group(ranks, world.timeout), _own_group(ranks.T, world.timeout)


def _own_group(ranks: Tensor, timeout: float) -> dist.ProcessGroup:
    """Each row of `ranks` becomes a group. Returns this rank's. A collective."""
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup)
    return group
