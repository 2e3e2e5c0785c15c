"""What mode=check finds, function by function. tests/runs/test_check_commands.py runs whole commands."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.errors import ConfigError
from lockstep.modes.check import UNKNOWN, Check, Options, Row, rows, table, what_a_resume_changes
from lockstep.modes.first_steps import Facts, Variant, differences, find_facts
from lockstep.tasks.classification import Classification
from support.configs import composed
from support.own_data import Noisy, Points
from support.worlds import in_world

OPTIONS = Options(precision="fp32", inexact_sync=None, per_rank=False, finds_unused=False)
MICRO = replace(OPTIONS, norms_see="one micro-batch", norms_advice="strategy=ddp")
NEAR = {"gradients": 1e-7, "weights": 1e-8}
FAR = {"gradients": 0.3, "weights": 0.1}


class OwnGenerator(Points):
    """Noise that no seed of a run reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point + self.generator.random(), label


class Growing(nn.Module):
    """Keeps what is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare, self.calls = nn.Linear(4, 2, dtype=torch.float64), nn.Linear(2, 2), 0

    def forward(self, inputs: Any) -> Any:
        self.calls += 1
        return self.layer(inputs) * self.calls


class Counting(nn.Module):
    """Keeps a number in a buffer, which it replaces, and has a table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 2, dtype=torch.float64), nn.Embedding(3, 2, sparse=True)
        self.table = self.table.double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: Any) -> Any:
        self.calls = self.calls + 1
        return self.layer(inputs) * self.calls + self.table(inputs.argmax(1) % 3)


class Annealed(nn.Module):
    """Counts its training steps in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 2), 0

    def forward(self, inputs: Any) -> Any:
        self.calls += self.training
        return self.layer(inputs) / (1 + self.calls)


class LateBuffer(nn.Module):
    """Registers a buffer in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Any) -> Any:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(4, dtype=inputs.dtype))
        return self.layer(inputs * self.mask)


class Renamed(LateBuffer):
    """Replaces a buffer by one of another name in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.ones(4))

    def forward(self, inputs: Any) -> Any:
        if hasattr(self, "first"):
            del self.first
        return super().forward(inputs)


class Listed(nn.Module):
    """A layer in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = [nn.Linear(4, 4, dtype=torch.float64)], nn.Linear(4, 2)

    def forward(self, inputs: Any) -> Any:
        return self.head(self.hidden[0](inputs))


class Simple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Any) -> Any:
        return self.layer(inputs)


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


class MeanTimesN(Classification):
    """A class-weighted mean times the number of samples."""

    def __call__(self, outputs: Any, targets: Any) -> Any:
        loss = F.cross_entropy(outputs, targets, weight=torch.tensor([0.2, 3.0]).to(outputs)) * len(targets)
        return loss, {"loss": loss, "accuracy": (outputs.argmax(1) == targets).sum()}


def facts(ranks: int, **values: Any) -> Facts:
    return Facts(ranks, digests={"fc.weight": 7}, **{"has_step": True, "loss": 2.0} | values)


def reasons(one: Facts, two: Facts, apart: Any = NEAR, options: Any = OPTIONS) -> list[str]:
    return ["; ".join(row.reasons) for row in rows(one, two, apart, options)]


def test_all_promises_hold() -> None:
    assert reasons(facts(1), facts(2)) == ["", "", ""]
    assert table([Row("short", [], "seen"), Row("a long promise", ["first", "second"], "")]) == [
        "promise         holds  because",
        "short           yes    seen",
        "a long promise  no     first",
        "                       second",
    ]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"two": facts(2, unsynced=["norm1", "norm2"])}, "share: norm1, norm2; type sync_bn=auto"),
        (
            {"one": facts(1, seed_counts=True, dropouts=["drop"])},
            "random numbers (drop), other ones on each rank; type strat",
        ),
        ({"one": facts(1, outputs_drawn=True)}, "computed twice gives other values"),
        (
            {
                "two": facts(2, unsynced=["norm1"]),
                "options": MICRO,
            },
            "batch norm sees one micro-batch: norm1; type strategy=ddp",
        ),
        ({}, "cause not found; perhaps"),
    ],
)
def test_causes_of_other_numbers_are_named_only_if_the_numbers_differ(found: dict[str, Any], said: str) -> None:
    worlds = {"one": facts(1), "two": facts(2)} | found
    assert said in reasons(**worlds, apart=FAR)[0]
    assert reasons(**worlds)[0] == ""


def test_what_breaks_a_promise_whatever_the_numbers_are() -> None:
    inexact = replace(OPTIONS, inexact_sync="powersgd")
    for apart in (NEAR, FAR):  # it begins as an exact mean
        found = reasons(facts(1), facts(2), apart=apart, options=inexact)[0]
        assert found == "gradient_sync=powersgd is not the exact mean; type gradient_sync=auto"
    assert "type trainer.batch_size=" in reasons(facts(1), facts(2), options=replace(OPTIONS, per_rank=True))[0]
    assert "another one at each start" in reasons(facts(1, fingerprint="a"), facts(2, fingerprint="b"))[1]
    assert "another one at each start" in reasons(facts(1, first_samples=[1]), facts(2, first_samples=[2]))[1]
    assert "the test data is another one" in reasons(facts(1), facts(2, has_step=False, other_data="test data"))[1]
    assert "freeze=[a.b]" in reasons(facts(1, unused=["a.b"]), facts(2))[2]


def test_a_first_step_that_was_taken_is_compared_and_another_one_is_not() -> None:
    diverged = reasons(facts(1, has_step=False, diverged="NaN at step 1", loss=None), facts(2), apart={})
    assert diverged == ["not checked: there is no first step", "", "NaN at step 1"]
    assert reasons(facts(1, diverged="NaN at step 3"), facts(2), apart=NEAR) == ["", "", "NaN at step 3"]
    skipped = reasons(facts(1), facts(2, not_finite=["fc.weight"]), apart={"gradients": 0.0, "weights": 0.0})
    assert "not checked" in skipped[0]
    assert skipped[2] == "NaN or infinite gradients: fc.weight"


def test_an_unexplained_difference_is_seen_beside_other_reasons() -> None:
    options = replace(OPTIONS, per_rank=True)
    assert UNKNOWN in reasons(facts(1), facts(2), FAR, options)[0]
    assert UNKNOWN not in reasons(facts(1), facts(2), NEAR, options)[0]


def test_other_losses_are_other_numbers() -> None:
    assert reasons(facts(1), facts(2, loss=2.1))[0]
    assert reasons(facts(1), facts(2, loss=2.0 + 1e-6))[0] == ""
    assert reasons(facts(1), facts(2, loss=2.0 + 1e-6), options=replace(OPTIONS, precision="fp64"))[0]


def test_rounding_of_a_gradient_that_is_zero_is_no_difference() -> None:
    large, zero = torch.ones(3), torch.zeros(3)
    one = {"gradients": {"a": large, "b": zero + 1e-9}, "weights": {"a": large, "b": large}}
    two = {"gradients": {"a": large, "b": zero - 1e-9}, "weights": {"a": large, "b": 1.01 * large}}
    found = differences(one, two)
    assert found["gradients"] < 1e-6
    assert found["weights"] == 0.0
    two["weights"]["a"] = 1.01 * large
    assert differences(one, two)["weights"] == pytest.approx(0.01, rel=1e-4)


def test_values_that_are_infinite_in_both_worlds_hide_no_others() -> None:
    one = {"gradients": {"a": torch.tensor([1.0, torch.inf])}, "weights": {"mask": torch.tensor([-torch.inf, 1.0])}}
    two = {"gradients": {"a": torch.tensor([1.1, torch.inf])}, "weights": {"mask": torch.tensor([-torch.inf, 1.0])}}
    assert differences(one, two) == {"gradients": pytest.approx(0.1), "weights": 0.0}
    two["gradients"]["a"] = torch.tensor([1.0, 1.0])
    assert differences(one, two)["gradients"] == float("inf")


def test_a_rank_that_another_program_has_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "a"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="type python src/train.py mode=check$"):
        Check().validate(None)  # type: ignore[arg-type]


def own_words(data: type, model: str) -> list[str]:
    """The overrides for these classes, in float64."""
    words = [f"dataset.{half}._target_={data.__module__}.{data.__name__}" for half in ("train", "test")]
    words += ["~dataset.train.train", "~dataset.test.train", "dataset.classes=2", "dataset.shape=[4]"]
    words += ["dataset.mean=null", "dataset.std=null", "trainer.precision=fp64"]
    return ["model=linear", *words, f"model._target_={__name__}.{model}", "~model.shape", "~model.classes"]


def checked(cfg: Any, folder: Path) -> Any:
    return find_facts(cfg, folder, Variant(timed=True))


def reasons_of_each(cases: list[Any], folder: Path) -> list[str]:
    """For each config what one rank, and one that goes on from what it has saved, give as reasons against a promise."""
    reasons = []
    for cfg in cases:
        one = checked(cfg, folder)
        resumed = find_facts(cfg, folder, Variant(resumes=True))
        of_rows = [reason for row in rows(one, one, NEAR, OPTIONS) for reason in row.reasons]
        reasons.append("; ".join([*of_rows, *what_a_resume_changes(resumed)]))
    return reasons


@pytest.mark.parametrize(("data", "drawn"), [(OwnGenerator, True), (Noisy, False)])
def test_one_rank_finds_what_is_drawn_outside_the_seeds(tmp_path: Path, data: type, drawn: bool) -> None:
    (found,) = in_world(1, checked, composed(*own_words(data, "Growing")), tmp_path)
    assert found.samples_drawn == drawn
    assert found.outputs_drawn
    assert found.unused == ["spare.weight", "spare.bias"]
    assert found.trained == 10
    assert found.nbytes == {"parameters": 16 * 8, "gradients": 10 * 8, "optimizer state": 10 * 8}


def test_buffers_are_no_hidden_state_and_sparse_gradients_are_compared(tmp_path: Path) -> None:
    plain = ["optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.fused=false", "trainer.max_grad_norm=null"]
    (found,) = in_world(1, checked, composed(*own_words(Points, "Counting"), *plain), tmp_path)
    assert (found.samples_drawn, found.outputs_drawn, found.seed_counts) == (False, False, False)
    assert (found.has_step, found.unused, found.not_finite, found.trained) == (True, [], [], 16)


OUTSIDE = ["~optimizer.momentum", "~optimizer.weight_decay", "~optimizer.nesterov", "~optimizer.fused"]
KINDS: list[tuple[str, list[str], str]] = [
    ("Simple", [], "^$"),
    ("Annealed", [], "computed twice gives other values.*the gradients of layer.weight, layer.bias are others"),
    ("LateBuffer", [], "^$"),
    ("Renamed", [], "what is saved after a step cannot be loaded by a new model .*register each buffer in __init__"),
    ("Listed", [], "no optimizer has 2 weights .*, in hidden: they are never trained"),
    ("Simple", [f"optimizer._target_={__name__}.Outside", *OUTSIDE], "is updated otherwise by the same gradients"),
    (
        "Simple",
        [f"task._target_={__name__}.MeanTimesN", "trainer.batch_size=7"],
        "the loss of the task does not add up over the samples",
    ),
]


def test_each_kind_of_wrong_numbers_that_a_step_can_show_gets_its_cause(tmp_path: Path) -> None:
    cases = [composed(*own_words(Points, model), "trainer.batch_size=4", *more) for model, more, _ in KINDS]
    (found,) = in_world(1, reasons_of_each, cases, tmp_path)
    for (model, _, wanted), reason in zip(KINDS, found, strict=True):
        assert re.search(wanted, reason), (model, reason)
