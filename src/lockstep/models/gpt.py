"""A GPT: a transformer that predicts the next token (Radford et al. 2019), without biases."""

import math
from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config.schema import Classes, Count, Fraction, Shape
from lockstep.errors import ConfigError

WEIGHT_STD = 0.02  # of the initial weights, as in GPT-2


def gpt(
    shape: Shape, classes: Classes, layers: Count, heads: Count, width: Count, dropout: Fraction, tied: bool
) -> nn.Sequential:
    """Token numbers (N, T) int64, T at most shape[0] -> logits of the next token (N, T, classes).

    Raises ConfigError if the heads cannot share the width.

    layers: blocks of attention and MLP.
    heads: heads of each attention; divides width.
    width: numbers of a token inside the model.
    dropout: share of the numbers that are dropped.
    tied: the output layer uses the weights of the token embedding (Press and Wolf 2017).
    """
    if width % heads:
        raise ConfigError(
            f"model.width={width} cannot be divided among model.heads={heads}; "
            f"type model.width={heads * max(1, round(width / heads))}"
        )
    if len(shape) != 1:
        raise ConfigError(f"model=gpt reads token numbers, not samples of shape {list(shape)}; type dataset=text")
    context = shape[0]
    blocks = {f"block{number}": Block(heads, width, dropout) for number in range(1, layers + 1)}
    embedding, head = Embedding(classes, context, width, dropout), Head(width, classes)
    model = nn.Sequential(OrderedDict[str, nn.Module](embedding=embedding, **blocks, head=head))
    for name, module in model.named_modules():  # as GPT-2: what is added to the residual stream, 2 a block, is smaller
        if isinstance(module, nn.Linear | nn.Embedding):
            is_added = name.endswith("projection")
            nn.init.normal_(module.weight, std=WEIGHT_STD / math.sqrt(2 * layers) if is_added else WEIGHT_STD)
    if tied:
        head.linear.weight = embedding.tokens.weight
    return model


class Embedding(nn.Module):
    """A vector for each token, plus one for its position. (N, T) int64 -> (N, T, width)."""

    def __init__(self, classes: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.is_floating_point() or tokens.dim() != 2 or tokens.shape[1] > self.positions.num_embeddings:
            raise ConfigError(
                f"model=gpt reads rows of at most {self.positions.num_embeddings} token numbers, and these samples "
                f"are {tokens.dtype} of shape {list(tokens.shape[1:])}; type dataset=text, or return int64 "
                "tokens from your own data"
            )
        vectors: Tensor = self.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        return vectors


class Block(nn.Module):
    """Attention between tokens, then an MLP for each token, both added to what came in. (N, T, width) -> the same."""

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(heads, width, dropout)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.mlp = MLP(width, dropout)

    def forward(self, vectors: Tensor) -> Tensor:
        vectors = vectors + self.attention(self.norm1(vectors))
        added: Tensor = vectors + self.mlp(self.norm2(vectors))
        return added


class Attention(nn.Module):
    """Each token looks at itself and at those before it, with several heads (Vaswani et al. 2017)."""

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_width, self.dropout = heads, width // heads, dropout
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)  # of one head after the other
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, vectors: Tensor) -> Tensor:
        joint = self.queries_keys_values(vectors)
        rows, tokens, numbers = joint.shape
        heads = numbers // (3 * self.head_width)  # with strategy=tensor_parallel a rank has some of them
        by_head = joint.view(rows, tokens, heads, 3, self.head_width)
        queries, keys, values = by_head.permute(3, 0, 2, 1, 4)  # each (N, heads, T, width / heads)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=dropout)
        projected: Tensor = self.projection(seen.transpose(1, 2).flatten(2))
        return F.dropout(projected, self.dropout, self.training)


class MLP(nn.Sequential):
    """Two linear layers with GELU between them, four times as wide inside."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(
            OrderedDict[str, nn.Module](
                widen=nn.Linear(width, 4 * width, bias=False),
                gelu=nn.GELU(),
                projection=nn.Linear(4 * width, width, bias=False),
                dropout=nn.Dropout(dropout),
            )
        )


class Head(nn.Module):
    """(N, T, width) -> the logits of the next token (N, T, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.linear = nn.Linear(width, classes, bias=False)

    def forward(self, vectors: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(vectors))
        return logits
