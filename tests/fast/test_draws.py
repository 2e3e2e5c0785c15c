"""What a forward pass draws belongs to the samples: it is the same however the batch is cut."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.training.rng import SampleDraws

BATCH = 24
TOGETHER, CUTS = (0, BATCH), [(0, 12, BATCH), (0, 7, BATCH), (0, 3, 5, 9, 10, BATCH), (0, 1, BATCH)]
# Layers whose tokens are not taken for as many samples.
LAYERS, AS_TOKENS = ("lstm", "attention", "attention, tokens first", "transformer"), (0, 5, 12, 17, BATCH)
ATTENTION = nn.MultiheadAttention(6, 2, dropout=0.3, dtype=torch.float64)
ATTENTION_OF_BATCHES = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True, dtype=torch.float64)
LSTM = nn.LSTM(6, 6, 2, dropout=0.3, batch_first=True, dtype=torch.float64)
ENCODER = nn.TransformerEncoderLayer(6, 2, 12, 0.2, batch_first=True, dtype=torch.float64)


def tokens_first(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x.transpose(0, 1)).transpose(0, 1)


# {what draws: a function of x (N, 5, 6)}
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": nn.Dropout(0.3),
    "dropout in place": lambda x: F.dropout(x * 2, 0.3, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "dropout1d": nn.Dropout1d(0.3),
    "dropout2d": lambda x: F.dropout2d(x.unsqueeze(-1), 0.3),
    "alpha_dropout": nn.AlphaDropout(0.3),
    "feature_alpha_dropout": nn.FeatureAlphaDropout(0.3),
    "dropout, tokens first": tokens_first(nn.Dropout(0.3)),
    "dropout of windows": lambda x: F.dropout(x.reshape(-1, 6), 0.3),
    "attention, tokens first": tokens_first(lambda x: ATTENTION(x, x, x)[0]),
    "attention": lambda x: ATTENTION_OF_BATCHES(x, x, x)[0],
    "attention without its weights": lambda x: ATTENTION_OF_BATCHES(x, x, x, need_weights=False)[0],
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.2),
    "attention with heads": lambda x: F.scaled_dot_product_attention(*[x.unflatten(2, (2, 3)).mT] * 3, dropout_p=0.2),
    "lstm": lambda x: LSTM(x)[0],
    "transformer": ENCODER,
    "stochastic depth": lambda x: torchvision.ops.stochastic_depth(x, 0.3, "row"),
    "gumbel_softmax": F.gumbel_softmax,
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randint_like": lambda x: x + torch.randint_like(x, 2, 9),
    "rand": lambda x: x + torch.rand(len(x), 1, 1),
    "randn": lambda x: x + torch.randn(len(x), 5, 1),
    "randint": lambda x: x + torch.randint(9, (len(x), 1, 1)),
    "a coin": lambda x: x * torch.rand(()),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)),
    "normal": lambda x: x + torch.normal(x.detach(), 0.1),
    "normal of tensors": lambda x: x + torch.normal(0.0, torch.ones(len(x), 5, 6)),
    "normal of a size": lambda x: x + torch.normal(0.0, 0.1, size=x.shape),
    "a gamma number": lambda x: x * torch.distributions.Beta(2.0, 2.0).sample(),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "distributions": lambda x: x + torch.distributions.Normal(x.detach(), 0.1).rsample(),
    "two": nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3)),
    "checkpoint": lambda x: checkpoint(lambda y: F.dropout(y, 0.3).sin(), x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(lambda y: F.dropout(y, 0.3).sin(), x, use_reentrant=True),
}


def passes(function: Callable[[Tensor], Tensor], inputs: Tensor, edges: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The outputs and gradients of the inputs, computed part by part."""
    draws, outputs, gradients = SampleDraws(), [], []
    for begin, end in pairwise(edges):
        torch.manual_seed(7)
        part = inputs[begin:end].clone().requires_grad_()
        with draws.of(begin, end - begin, len(inputs)):
            output = function(part)
            output.square().sum().backward()
        assert draws.has_drawn
        outputs.append(output.detach().reshape(end - begin, -1))
        gradients.append(part.grad)
    return torch.cat(outputs), torch.cat(gradients)


@pytest.mark.parametrize("what", DRAWS)
def test_each_sample_draws_the_same_however_the_batch_is_cut(what: str) -> None:
    inputs = torch.rand(BATCH, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    outputs, gradients = passes(DRAWS[what], inputs, TOGETHER)
    for edges in [*CUTS, *([AS_TOKENS] if what in LAYERS else [])]:
        others, their_gradients = passes(DRAWS[what], inputs, edges)
        torch.testing.assert_close(others, outputs, rtol=0, atol=1e-12)
        torch.testing.assert_close(their_gradients, gradients, rtol=0, atol=1e-12)


def test_masks_of_samples_layers_and_steps_are_independent() -> None:
    masks = []
    for step in range(3):
        torch.manual_seed(step)
        with SampleDraws().of(0, 100, 100):
            masks += [F.dropout(torch.ones(100, 2000)).sign() for _ in range(3)]
    drawn = torch.cat(masks) * 2 - 1  # (900, 2000)
    together = drawn @ drawn.T / 2000
    assert together.fill_diagonal_(0).abs().max() < 6 / 2000**0.5  # 6 standard deviations, of 404,550 pairs


def test_what_decides_about_a_layer_or_a_parameter_is_the_same_on_all_ranks_and_draws_without_samples_is_not() -> None:
    coins, masks, orders, weights, weight = set(), [], [], [], nn.Parameter(torch.ones(6, 4))
    for start, rows in ((0, 7), (7, 9)):
        torch.manual_seed(7)
        with SampleDraws().of(start, rows, 16):
            weights.append(torch.cat([torch.randn_like(weight), F.dropout(weight)]).detach())
            whole = torchvision.ops.stochastic_depth(torch.ones(rows, 5, 6), 0.5, "batch")
            coins.add((float(torch.rand(())), float(torch.rand(1)), float(whole.sum()) > 0))
            masks.append(F.dropout(torch.ones(1001)))
            orders.append(torch.randperm(1001))
    assert (len(coins), torch.equal(*weights)) == (1, True)
    assert not torch.equal(*masks)
    assert not torch.equal(*orders)
