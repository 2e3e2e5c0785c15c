"""What mode=check says of kinds of models, data and tasks. tests/runs/test_check_commands.py runs whole commands."""

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.modes.check import RANKS, Check, Row, checked, known_before, table
from lockstep.modes.first_steps import STAGES, differences
from lockstep.tasks.classification import Classification
from support.configs import composed, parts_of
from support.own_data import Noisy, Points
from support.worlds import in_world

# Data.


class OwnGenerator(Points):
    """Noise that no seed of a run reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point + self.generator.random(), label


class InPlace(Points):
    """Changes what it keeps."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point.mul_(0.9), label


class Keeping(Noisy):
    """Keeps each sample with its noise."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


class Unseeded(Points):
    """Other points at each start."""

    def __init__(self) -> None:
        super().__init__()
        self.points = torch.from_numpy(np.random.default_rng().standard_normal((23, 4)))


# Models of points (4,).


class Simple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs)
        return out


class OwnWeights(Simple):
    """Draws its first weights from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.data += torch.from_numpy(np.random.default_rng().standard_normal((2, 4))).float()


class Annealed(Simple):
    """Counts its training steps in a plain attribute."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(inputs) / (1 + self.calls)


class Moving(Simple):
    """Keeps a running mean in a plain attribute, which it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, inputs: Tensor) -> Tensor:
        mean = self.mean
        if self.training:
            self.mean = 0.5 * mean + 0.5 * inputs.detach().mean(0)
        return super().forward(inputs - mean)


class OwnNumbers(Simple):
    """Draws from a generator of its own, all ranks alike."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(0)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs * float(self.numbers.random()))


class Coin(Simple):
    """One number for all samples."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs * (np.random.rand() + random.random()))


class NumpyNoise(Simple):
    """A number for each sample, from a generator that does not know which samples they are."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs * torch.from_numpy(np.random.rand(len(inputs), 1)))


class Noisy4(Simple):
    """What it draws has no dimension of the batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs * torch.rand(4, dtype=inputs.dtype))


class Dropping(Simple):
    def forward(self, inputs: Tensor) -> Tensor:
        return F.dropout(super().forward(inputs), 0.3)


class Compares(Simple):
    """Each sample depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = Centre()

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.centre(super().forward(inputs))
        return out


class Centre(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - 0.5 * inputs.mean(0)


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Running(Simple):
    """Reads a mean of the samples that it has seen."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        out = super().forward(inputs - self.mean)
        self.mean.lerp_(inputs.mean(0), 0.1)
        return out


class Codebook(Simple):
    """Counts the samples near each of two codes."""

    sizes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        self.sizes.lerp_(F.one_hot((inputs[:, 0] > 0).long(), 2).sum(0).to(self.sizes), 0.5)
        return super().forward(inputs)


class LateBuffer(Simple):
    """Registers a buffer in its first step."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(4, dtype=inputs.dtype))
        return super().forward(inputs * self.mask)


class Renamed(LateBuffer):
    """Replaces a buffer by one of another name in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        if hasattr(self, "first"):
            del self.first
        return super().forward(inputs)


class OtherNames(Simple):
    """Its state dict has other names than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(under_other_names)
        self.register_load_state_dict_pre_hook(under_own_names)


def under_other_names(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for name in ("weight", "bias"):
        state[f"{prefix}head_{name}"] = state.pop(f"{prefix}layer.{name}")


def under_own_names(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for name in ("weight", "bias"):
        state[f"{prefix}layer.{name}"] = state.pop(f"{prefix}head_{name}")


class Listed(Simple):
    """A layer in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(4, 4, dtype=torch.float64)]

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.hidden[0](inputs))


class Spare(Simple):
    """A layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Expert(Spare):
    """A layer that a share of a batch does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        out = super().forward(inputs)
        return out + 0 * self.spare(inputs) if len(inputs) > 10 else out


class Vmapped(Simple):
    """Calls its layer inside of torch.func.vmap."""

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = torch.func.vmap(self.layer)(inputs)
        return out


class Looked(Simple):
    """A sparse table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 4, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs + self.table((inputs[:, 0] > 0).long()))


class Infinite(Simple):
    """Its outputs are finite, and its gradients are not."""

    def forward(self, inputs: Tensor) -> Tensor:
        out = super().forward(inputs)
        return out + (out - out).sqrt()


class Counting(Simple):
    """Keeps a number in a buffer, which it replaces, and has a table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=True)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls = self.calls + 1
        out: Tensor = super().forward(inputs * self.calls) + self.table(inputs.argmax(1) % 3)
        return out


class Odd(Simple):
    """Weights of half precision, and a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.bfloat16()
        self.register_buffer("eye", torch.eye(3).to_sparse())

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.bfloat16()).float()


class Activated(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 2))


class Dropped(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 2))


# Tasks and optimizers.


class MeanTimesN(Classification):
    """A class-weighted mean times the number of samples."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        loss = F.cross_entropy(outputs, targets, weight=torch.tensor([0.2, 3.0]).to(outputs)) * len(targets)
        return loss, {"loss": loss, "accuracy": (outputs.argmax(1) == targets).sum()}


class DrawnLoss(Classification):
    """One number for all samples, too."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        loss, sums = super().__call__(outputs, targets)
        return loss * (1 + np.random.rand()), sums


class Outside(torch.optim.Optimizer):
    """Keeps its velocity outside self.state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.velocity: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.velocity.setdefault(p, torch.zeros_like(p))
                p.sub_(velocity.mul_(0.9).add_(p.grad), alpha=group["lr"])


def words(model: type, data: type = Points, *more: str) -> Any:
    """The config for these classes, in float64."""
    nodes = [f"dataset.{split}._target_={data.__module__}.{data.__name__}" for split in ("train", "test")]
    lines = ["dataset=pair", *nodes, "dataset.classes=2", "dataset.shape=[4]"]
    lines += ["trainer.precision=fp64", "trainer.batch_size=14"]
    lines += ["model=linear", f"model._target_={model.__module__}.{model.__name__}"]
    return composed(*lines, *more)


OUTSIDE = [f"optimizer._target_={__name__}.Outside", "optimizer.lr=0.05"]
RECENT = ["optimizer._target_=zoo.optimizers.Recent", "optimizer.lr=0.05"]
MIXED = ["loader.collate_fn={_target_:support.own_data.mixed}"]
YES = ("", "", "")
BATCH = ["trainer.gradient_accumulation_steps=2"]
PIPELINE = ["strategy=pipeline", "strategy.micro_batches=2"]
COUNTED = "the model or the loss keeps what no snapshot has"
# A model, data, more words, and for each promise a part of its only reason, or "" if it holds.
KINDS: list[tuple[type, type, list[str], tuple[str, str, str]]] = [
    (Simple, Noisy, [], YES),
    (Dropping, Points, ["optimizer=adamw", "trainer.ema=0.9"], YES),
    (Normed, Points, ["trainer.ema=0.9"], YES),
    (Simple, Points, ["strategy=fsdp", *BATCH], YES),
    (LateBuffer, Points, [], YES),
    (Odd, Points, ["trainer.precision=fp32"], YES),
    (Activated, Points, ["strategy=tensor_parallel", "strategy.plan=[{0:colwise},{2:rowwise}]"], YES),
    (Counting, Points, ["optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.fused=false"], YES),
    (Spare, Points, ["strategy.find_unused_parameters=true"], YES),
    (Expert, Points, [], ("parameters without a gradient, see below", "", "spare.bias; type strategy.find_unused")),
    (Vmapped, Points, [], YES),
    (OtherNames, Points, [], YES),
    (Looked, Points, ["optimizer.weight_decay=0"], YES),
    (Simple, OwnGenerator, [], ("a sample is another one on another rank", "a sample read twice is another one", "")),
    (Simple, InPlace, [], ("", "a sample read twice is another one", "")),
    (Simple, Keeping, [], ("a sample is another one on another rank", "a sample depends on what was read before", "")),
    (Simple, Unseeded, [], ("not checked: there is no first step", "data is another one at each start", "")),
    (OwnWeights, Points, [], ("initial weights are not drawn from torch's gen", "initial weights are not drawn", "")),
    (Annealed, Points, [], ("", f"after a resume the outputs of Annealed are others: {COUNTED}", "")),
    (OwnNumbers, Points, [], ("", f"after a resume the outputs of layer (Linear) are others: {COUNTED}", "")),
    (Coin, Points, [], YES),
    (Coin, Points, BATCH, YES),
    (NumpyNoise, Points, [], ("draws from numpy.random, which gives the same numbers to each of the 2 parts", "", "")),
    (Noisy4, Points, [], ("draws random numbers that belong to no sample", "", "")),
    (Compares, Points, [], ("centre (Centre) is the first layer with other outputs for the same samples", "", "")),
    (Normed, Points, ["sync_bn=off"], ("batch norm sees a rank's share: 1; type sync_bn=auto", "", "")),
    (Normed, Points, ["strategy=virtual_ranks"], YES),
    (Normed, Points, PIPELINE, ("batch norm sees one micro-batch: 1; type strategy=ddp", "", "")),
    (Dropped, Points, PIPELINE, ("draw dropout and noise for their own parts of the model; type strategy=ddp", "", "")),
    (Running, Points, [], ("the buffer mean differs between ranks after step 1", "", "")),
    (Codebook, Points, ["trainer.buffers=mean"], ("a rank changes sizes by its own share", "", "")),
    (Renamed, Points, [], ("", "what is saved after a step cannot be loaded by a new model", "")),
    (Listed, Points, [], ("", "", "no optimizer has 2 weights")),
    (
        Spare,
        Points,
        [],
        ("parameters without a gradient, see below", "", "spare.weight, spare.bias; type strategy.find"),
    ),
    (Infinite, Points, [], ("not checked: ", "", "NaN or infinite gradients: layer.weight, layer.bias")),
    (Simple, Points, [f"task._target_={__name__}.MeanTimesN"], ("the loss of the task does not add up", "", "")),
    (Simple, Points, [f"task._target_={__name__}.DrawnLoss"], YES),
    (Simple, Points, OUTSIDE, ("", "is updated otherwise by the same gradients: the optimizer keeps", "")),
    (Simple, Points, ["gradient_sync=powersgd"], ("gradient_sync=powersgd is not the exact mean; type gra", "", "")),
    (Simple, Points, MIXED, ("a sample is another one on another rank", "", "")),
    (Moving, Points, [], ("", f"after a resume the outputs of layer (Linear) are others: {COUNTED}", "")),
    (Simple, Points, RECENT, ("", "Recent keeps a deque in state_dict()", "")),
    (Dropping, Points, ["trainer.compile=true"], ("compiled, dropout and noise are drawn for a rank", "", "")),
]


def verdicts(cases: list[Any]) -> list[list[list[str]]]:
    """For each config the reasons against each promise."""
    found = []
    for config in cases:
        of_ranks = {count: parts_of(config) for count in (1, RANKS)}
        with tempfile.TemporaryDirectory() as folder:
            rows, _ = checked(config, Path(folder), 14, known_before(config, of_ranks[RANKS]), of_ranks)
        found.append([row.reasons for row in rows])
    return found


@pytest.mark.parametrize("part", range(4))
def test_each_kind_of_wrong_numbers_that_a_step_can_show_gets_its_cause(part: int) -> None:
    kinds = KINDS[part::4]
    (found,) = in_world(1, verdicts, [words(model, data, *more) for model, data, more, _ in kinds])
    for (model, data, more, wanted), reasons in zip(kinds, found, strict=True):
        for sentences, words_of_it in zip(reasons, wanted, strict=True):
            case = model.__name__, data.__name__, more, sentences
            assert bool(sentences) == bool(words_of_it), case
            assert not sentences or words_of_it in sentences[0], case


def test_a_gpt_with_dropout_and_a_moving_average_keeps_all_promises(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh" * 200)
    text = ["dataset=text", f"dataset.path={tmp_path}/text.txt", "dataset.block=16", f"dataset.tokens_dir={tmp_path}"]
    text += ["model.layers=2", "model.width=16", "trainer.ema=0.9", "optimizer=adamw"]
    words = [*text, "trainer.batch_size=8"]
    compiled = composed(*words, "model.dropout=0", "trainer.compile=true")  # an attention that may draw, and does not
    assert in_world(1, verdicts, [composed(*words, "model.dropout=0.1"), compiled]) == [[[[], [], []]] * 2]


def test_rounding_of_a_gradient_that_is_zero_is_no_difference() -> None:
    large, zero = torch.ones(3), torch.zeros(3)
    one = {stage: dict[str, Tensor]() for stage in STAGES}
    one |= {"gradients": {"a": large, "b": zero + 1e-9}, "weights": {"a": large, "b": large, "mean": 1e-17 * large}}
    one["start"] = {"a": zero, "b": zero}
    two = one | {"gradients": {"a": large, "b": zero - 1e-9}}
    two["weights"] = {"a": large, "b": 1.01 * large, "mean": -1e-17 * large}
    near = differences(one, two, False)
    assert max(near["gradients"].values()) < 1e-6
    assert near["weights"] == {"a": 0.0, "b": 0.0, "mean": pytest.approx(2e-14)}
    assert differences(one, two, True)["weights"]["b"] == pytest.approx(0.01, rel=1e-4)  # the bits are others
    two["weights"]["a"] = 1.01 * large
    assert differences(one, two, False)["weights"]["a"] == pytest.approx(0.01, rel=1e-4)


def test_values_that_are_infinite_in_both_worlds_hide_no_others() -> None:
    one = {stage: dict[str, Tensor]() for stage in STAGES}
    one |= {"gradients": {"a": torch.tensor([1.0, torch.inf])}, "weights": {"mask": torch.tensor([-torch.inf, 1.0])}}
    two = one | {"gradients": {"a": torch.tensor([1.1, torch.inf])}}
    found = differences(one, two, False)
    assert (found["gradients"]["a"], found["weights"]["mask"]) == (pytest.approx(0.1), 0.0)
    two["gradients"]["a"] = torch.tensor([1.0, 1.0])
    assert differences(one, two, False)["gradients"]["a"] == float("inf")


def test_a_rank_that_another_program_has_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "a"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="type python src/train.py mode=check$"):
        Check().validate(None)  # type: ignore[arg-type]


def test_each_reason_has_a_line_of_the_table() -> None:
    assert table([Row("short", [], "seen"), Row("a long promise", ["first", "second"], "")]) == [
        "promise         holds  because",
        "short           yes    seen",
        "a long promise  no     first",
        "                       second",
    ]
