"""A GPT: a transformer that predicts the next token (Radford et al. 2019), without biases."""

import math
from collections import OrderedDict
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config.schema import Classes, Count, Fraction, Shape
from lockstep.errors import ConfigError

WEIGHT_STD = 0.02  # of the initial weights, as in GPT-2


def gpt(
    shape: Shape,
    classes: Classes,
    layers: Count,
    heads: Count,
    width: Count,
    dropout: Fraction,
    tied: bool,
    variant: Literal["gpt2", "modern"],
) -> nn.Sequential:
    """Tokens (N, T) int64, T at most shape[0] -> logits of the next token (N, T, classes).

    layers: blocks of attention and MLP. heads: of each attention. width: numbers of a token inside the model.
    tied: the output layer uses the weights of the token embedding (Press and Wolf 2017). variant: gpt2, or modern:
    rotary positions (Su et al. 2021) of normalised queries and keys (Henry et al. 2020), squared ReLU (So et al. 2021),
    half of what an attention reads from the token before (Peng et al. 2023), and projections that begin with 0.

    Raises ConfigError if the heads cannot share the width.
    """
    modern = variant == "modern"
    step = heads * (2 if modern else 1)  # rotary positions turn pairs of numbers
    if width % step:
        what = f"model.width={width} cannot be divided among model.heads={heads}"
        raise ConfigError(f"{what}{' in pairs' * modern}; type model.width={step * max(1, round(width / step))}")
    if len(shape) != 1:
        raise ConfigError(f"model=gpt reads tokens, not samples of shape {list(shape)}; type dataset=text")
    context = shape[0]
    blocks = {f"block{number + 1}": Block(context, heads, width, dropout, modern) for number in range(layers)}
    embedding = Embedding(classes, context, width, dropout, modern)
    norm, linear = nn.LayerNorm(width, bias=False), nn.Linear(width, classes, bias=False)
    head = nn.Sequential(OrderedDict[str, nn.Module](norm=norm, linear=linear))
    model = nn.Sequential(OrderedDict[str, nn.Module](embedding=embedding, **blocks, head=head))
    for name, module in model.named_modules():  # as GPT-2: what is added to the residual stream, 2 a block, is smaller
        if isinstance(module, nn.Linear | nn.Embedding):
            added = 0.0 if modern else WEIGHT_STD / math.sqrt(2 * layers)
            nn.init.normal_(module.weight, std=added if name.endswith("projection") else WEIGHT_STD)
    if tied:
        linear.weight = embedding.tokens.weight
    return model


class Embedding(nn.Module):
    """A vector for each token, plus one for its place unless `modern`. (N, T) int64 -> (N, T, width)."""

    def __init__(self, classes: int, context: int, width: int, dropout: float, modern: bool) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(classes, width)
        self.positions = None if modern else nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.is_floating_point() or tokens.dim() != 2 or tokens.shape[1] > self.context:
            what = f"model=gpt reads rows of at most {self.context} tokens, and these samples are {tokens.dtype}"
            raise ConfigError(f"{what} of shape {list(tokens.shape[1:])}; type dataset=text, or return int64 tokens")
        vectors: Tensor = self.tokens(tokens)
        if self.positions is not None:
            vectors = vectors + self.positions.weight[: tokens.shape[1]]
        return self.dropout(vectors)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention between tokens, then an MLP for each token, both added to what came in. (N, T, width) -> the same."""

    def __init__(self, context: int, heads: int, width: int, dropout: float, modern: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(context, heads, width, dropout, modern)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(
            OrderedDict[str, nn.Module](
                widen=nn.Linear(width, 4 * width, bias=False),
                activation=ReLUSquared() if modern else nn.GELU(),
                projection=nn.Linear(4 * width, width, bias=False),
                dropout=nn.Dropout(dropout),
            )
        )

    def forward(self, vectors: Tensor) -> Tensor:
        vectors = vectors + self.attention(self.norm1(vectors))
        return vectors + self.mlp(self.norm2(vectors))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Each token looks at itself and at those before it, with several heads (Vaswani et al. 2017)."""

    def __init__(self, context: int, heads: int, width: int, dropout: float, modern: bool) -> None:
        super().__init__()
        self.heads, self.head_width, self.dropout, self.modern = heads, width // heads, dropout, modern
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)  # of one head after the other
        self.projection = nn.Linear(width, width, bias=False)
        if modern:  # by which angle each pair of numbers is turned at each place
            pairs = torch.arange(0, self.head_width, 2) / self.head_width
            angles = torch.outer(torch.arange(context), 10_000.0**-pairs)
            self.cos, self.sin = (nn.Buffer(turn, persistent=False) for turn in (angles.cos(), angles.sin()))

    def forward(self, vectors: Tensor) -> Tensor:
        if self.modern:  # half of the numbers are those of the token before, and 0 for the first one
            kept, moved = vectors.chunk(2, -1)
            vectors = torch.cat([kept, F.pad(moved[:, :-1], (0, 0, 1, 0))], -1)
        # With strategy=tensor_parallel a rank has some of the heads.
        by_head = self.queries_keys_values(vectors).unflatten(-1, (-1, 3, self.head_width))
        queries, keys, values = by_head.permute(3, 0, 2, 1, 4)  # each (N, heads, T, width / heads)
        if self.modern:
            queries, keys = self._placed(queries), self._placed(keys)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=dropout)
        return F.dropout(self.projection(seen.transpose(1, 2).flatten(2)), self.dropout, self.training)

    def _placed(self, vectors: Tensor) -> Tensor:
        """(N, heads, T, width), normalised, the pairs of number i and i + width / 2 turned by their place's angle."""
        first, second = F.rms_norm(vectors, (self.head_width,)).chunk(2, -1)
        cos, sin = self.cos[: vectors.shape[2]], self.sin[: vectors.shape[2]]
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class ReLUSquared(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return F.relu(values).square()
