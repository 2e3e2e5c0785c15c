"""Batch norm over all ranks: what is taken over, refused, and told apart. test_same_numbers.py has its numbers."""

import pytest
import torch
from torch import nn

from lockstep.distributed.sync_batch_norm import SyncBatchNorm, convert_sync_batch_norm
from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from support.worlds import distance, in_world


class WithActivation(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


def of_one_layer():
    """A layer with two names stays one, and keeps its hooks and names; a large mean costs no digits; an evaluation is
    no collective; a layer with a forward pass of its own is refused."""
    torch.manual_seed(0)
    norm, inputs = nn.BatchNorm1d(2).double(), torch.randn(8, 2, dtype=torch.double)
    expected = nn.BatchNorm1d(2).double()(inputs) + 1
    norm.register_forward_hook(lambda module, inputs, outputs: outputs + 1)
    model = nn.ModuleDict({"norm": norm, "inner": nn.Sequential(norm)})
    names = list(model.state_dict())
    with join_world("gloo", 60) as world:
        convert_sync_batch_norm(model, world)
        assert isinstance(model["inner"][0], SyncBatchNorm)
        assert model["inner"][0] is model["norm"]
        assert list(model.state_dict()) == names
        own = slice(0, 3) if world.is_rank_zero else slice(3, 8)
        assert distance(expected[own].detach(), model["norm"](inputs[own] + 2000).detach()) < 1e-12
        if world.is_rank_zero:
            model.eval()["norm"](inputs)
        with pytest.raises(ConfigError) as raised:
            convert_sync_batch_norm(nn.Sequential(WithActivation(3)), world)
        world.barrier()
    return str(raised.value)


def test_a_layer_is_taken_over_with_all_that_it_has_or_refused():
    for said in in_world(2, of_one_layer):
        assert "in place of 0, and WithActivation has a forward pass of its own, which would be lost; type sync" in said
