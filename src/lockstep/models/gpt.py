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
ROTARY_BASE = 10_000.0


Positions = Literal["learned", "rotary"]
Activation = Literal["gelu", "relu_squared"]


def gpt(
    shape: Shape,
    classes: Classes,
    layers: Count,
    heads: Count,
    width: Count,
    dropout: Fraction,
    tied: bool,
    positions: Positions,
    activation: Activation,
    qk_norm: bool,
    zero_init: bool,
    token_shift: bool,
) -> nn.Sequential:
    """Token numbers (N, T) int64, T at most shape[0] -> logits of the next token (N, T, classes).

    Raises ConfigError if the heads cannot share the width.

    layers: blocks of attention and MLP.
    heads: heads of each attention; divides width.
    width: numbers of a token inside the model.
    dropout: share of the numbers that are dropped.
    tied: the output layer uses the weights of the token embedding (Press and Wolf 2017).
    positions: learned: a vector for each place; rotary: queries and keys are turned by their place (Su et al. 2021).
    activation: between the layers of the MLP; relu_squared: as So et al. 2021.
    qk_norm: queries and keys have the norm of their width's root (Henry et al. 2020).
    zero_init: what is added to the residual stream begins with 0.
    token_shift: half of the numbers that an attention reads are those of the token before (Peng et al. 2023).
    """
    if width % heads:
        raise ConfigError(
            f"model.width={width} cannot be divided among model.heads={heads}; "
            f"type model.width={heads * max(1, round(width / heads))}"
        )
    if len(shape) != 1:
        raise ConfigError(f"model=gpt reads token numbers, not samples of shape {list(shape)}; type dataset=text")
    if positions == "rotary" and width // heads % 2:
        raise ConfigError(
            f"model.positions=rotary turns pairs of numbers, and a head has {width // heads}; "
            f"type model.width={width + heads}, or model.positions=learned"
        )
    context = shape[0]
    angles = rotary_angles(context, width // heads) if positions == "rotary" else None
    blocks = {
        f"block{number}": Block(
            Attention(heads, width, dropout, angles, qk_norm, token_shift), MLP(width, dropout, activation)
        )
        for number in range(1, layers + 1)
    }
    embedding, head = Embedding(classes, context, width, dropout, positions), Head(width, classes)
    model = nn.Sequential(OrderedDict[str, nn.Module](embedding=embedding, **blocks, head=head))
    for name, module in model.named_modules():  # as GPT-2: what is added to the residual stream, 2 a block, is smaller
        if isinstance(module, nn.Linear | nn.Embedding):
            is_added = name.endswith("projection")
            std = 0.0 if is_added and zero_init else WEIGHT_STD / math.sqrt(2 * layers) if is_added else WEIGHT_STD
            nn.init.normal_(module.weight, std=std)
    if tied:
        head.linear.weight = embedding.tokens.weight
    return model


class Embedding(nn.Module):
    """A vector for each token, plus one for its position where those are learned. (N, T) int64 -> (N, T, width)."""

    def __init__(self, classes: int, context: int, width: int, dropout: float, positions: Positions) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(classes, width)
        self.positions = nn.Embedding(context, width) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.is_floating_point() or tokens.dim() != 2 or tokens.shape[1] > self.context:
            raise ConfigError(
                f"model=gpt reads rows of at most {self.context} token numbers, and these samples "
                f"are {tokens.dtype} of shape {list(tokens.shape[1:])}; type dataset=text, or return int64 "
                "tokens from your own data"
            )
        vectors: Tensor = self.tokens(tokens)
        if self.positions is not None:
            vectors = vectors + self.positions.weight[: tokens.shape[1]]
        dropped: Tensor = self.dropout(vectors)
        return dropped


class Block(nn.Module):
    """Attention between tokens, then an MLP for each token, both added to what came in. (N, T, width) -> the same."""

    def __init__(self, attention: "Attention", mlp: "MLP") -> None:
        super().__init__()
        width = attention.projection.out_features
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.mlp = mlp

    def forward(self, vectors: Tensor) -> Tensor:
        vectors = vectors + self.attention(self.norm1(vectors))
        added: Tensor = vectors + self.mlp(self.norm2(vectors))
        return added


class Attention(nn.Module):
    """Each token looks at itself and at those before it, with several heads (Vaswani et al. 2017).

    angles: (T, width / heads / 2) of `rotary_angles`; None: queries and keys are not turned.
    qk_norm: whether each query and key gets the norm of its width's root.
    token_shift: whether half of the numbers are those of the token before, and 0 for the first one.
    """

    def __init__(
        self, heads: int, width: int, dropout: float, angles: Tensor | None, qk_norm: bool, token_shift: bool
    ) -> None:
        super().__init__()
        self.heads, self.head_width, self.dropout = heads, width // heads, dropout
        self.qk_norm, self.token_shift = qk_norm, token_shift
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)  # of one head after the other
        self.projection = nn.Linear(width, width, bias=False)
        self.register_buffer("cos", None if angles is None else angles.cos(), persistent=False)
        self.register_buffer("sin", None if angles is None else angles.sin(), persistent=False)
        self.cos: Tensor | None
        self.sin: Tensor | None

    def forward(self, vectors: Tensor) -> Tensor:
        if self.token_shift:
            kept, moved = vectors.chunk(2, -1)
            vectors = torch.cat([kept, F.pad(moved[:, :-1], (0, 0, 1, 0))], -1)
        joint = self.queries_keys_values(vectors)
        rows, tokens, numbers = joint.shape
        heads = numbers // (3 * self.head_width)  # with strategy=tensor_parallel a rank has some of them
        by_head = joint.view(rows, tokens, heads, 3, self.head_width)
        queries, keys, values = by_head.permute(3, 0, 2, 1, 4)  # each (N, heads, T, width / heads)
        if self.qk_norm:
            queries, keys = (F.rms_norm(part, (self.head_width,)) for part in (queries, keys))
        if self.cos is not None and self.sin is not None:
            queries, keys = (turned(part, self.cos[:tokens], self.sin[:tokens]) for part in (queries, keys))
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=dropout)
        projected: Tensor = self.projection(seen.transpose(1, 2).flatten(2))
        return F.dropout(projected, self.dropout, self.training)


def rotary_angles(context: int, head_width: int) -> Tensor:
    """(context, head_width / 2): by which angle each pair of numbers is turned at each place (Su et al. 2021)."""
    pairs = torch.arange(0, head_width, 2) / head_width
    return torch.outer(torch.arange(context), ROTARY_BASE**-pairs)


def turned(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(..., T, width), the pairs of number i and i + width / 2 turned by the angles (T, width / 2)."""
    first, second = vectors.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class MLP(nn.Sequential):
    """Two linear layers with an activation between them, four times as wide inside."""

    def __init__(self, width: int, dropout: float, activation: Activation) -> None:
        super().__init__(
            OrderedDict[str, nn.Module](
                widen=nn.Linear(width, 4 * width, bias=False),
                activation=nn.GELU() if activation == "gelu" else ReLUSquared(),
                projection=nn.Linear(4 * width, width, bias=False),
                dropout=nn.Dropout(dropout),
            )
        )


class ReLUSquared(nn.Module):
    """max(x, 0)^2 (So et al. 2021)."""

    def forward(self, values: Tensor) -> Tensor:
        return F.relu(values).square()


class Head(nn.Module):
    """(N, T, width) -> the logits of the next token (N, T, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.linear = nn.Linear(width, classes, bias=False)

    def forward(self, vectors: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(vectors))
        return logits
