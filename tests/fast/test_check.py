"""What mode=check finds, function by function. tests/runs/test_check_commands.py runs whole commands."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.check_run import check_worker, not_picklable
from lockstep.errors import ConfigError
from lockstep.modes.check import Check, Options, Row, rows, table
from lockstep.modes.check_steps import Draws, Facts, differences
from support.configs import composed
from support.own_data import Noisy, Points
from support.worlds import in_world

OPTIONS = Options(precision="fp32", inexact_sync=None, per_rank=False, finds_unused=False)
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


class Locked(Points):
    def __init__(self) -> None:
        super().__init__()
        self.inner = {"lock": threading.Lock()}


def facts(ranks: int, **values: Any) -> Facts:
    return Facts(ranks, unsynced=values.pop("unsynced", []), digests={"fc.weight": 7}, **{"loss": 2.0} | values)


def reasons(one: Facts, two: Facts, draws: Draws | None = None, apart: Any = NEAR, options: Any = OPTIONS) -> list[str]:
    return ["; ".join(row.reasons) for row in rows(one, two, draws or Draws(), apart, options)]


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
            {"draws": Draws(by_rank=True, dropouts=["drop"])},
            "random numbers (drop), other ones on each rank; type strat",
        ),
        ({"draws": Draws(outputs=True)}, "computed twice gives other outputs"),
        ({"options": replace(OPTIONS, inexact_sync="local_sgd")}, "gradient_sync=local_sgd is not the exact mean"),
        ({}, "cause not found; perhaps"),
    ],
)
def test_causes_of_other_numbers_are_named_only_if_the_numbers_differ(found: dict[str, Any], said: str) -> None:
    worlds = {"one": facts(1), "two": facts(2)} | found
    assert said in reasons(**worlds, apart=FAR)[0]
    assert reasons(**worlds)[0] == ""


def test_what_breaks_a_promise_whatever_the_numbers_are() -> None:
    assert "type trainer.batch_size=" in reasons(facts(1), facts(2), options=replace(OPTIONS, per_rank=True))[0]
    assert "another one at each start" in reasons(facts(1, fingerprint="a"), facts(2, fingerprint="b"))[1]
    assert "freeze=[a.b]" in reasons(facts(1, unused=["a.b"]), facts(2))[2]
    diverged = reasons(facts(1, diverged="NaN at step 1", loss=None), facts(2), apart={})
    assert diverged == ["not checked: there is no first step", "", "NaN at step 1"]


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


def test_what_cannot_be_pickled_is_named() -> None:
    assert not_picklable(Points(), "the training data") is None
    found = not_picklable(Locked(), "the training data")
    assert found is not None
    assert found.startswith("the training data.inner.lock cannot be pickled (")
    found = not_picklable([abs, lambda point: point], "dataset.transforms")
    assert found is not None
    assert found.startswith("dataset.transforms.1 cannot be pickled (")


def test_a_rank_that_another_program_has_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "a"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="type python src/train.py mode=check$"):
        Check().validate(None)  # type: ignore[arg-type]


def checked(cfg: Any, folder: Path) -> Any:
    return check_worker(cfg, folder, timed=True)


@pytest.mark.parametrize(("data", "drawn"), [(OwnGenerator, True), (Noisy, False)])
def test_one_rank_finds_what_is_drawn_outside_the_seeds(tmp_path: Path, data: type, drawn: bool) -> None:
    words = [f"dataset.{half}._target_={data.__module__}.{data.__name__}" for half in ("train", "test")]
    words += ["~dataset.train.train", "~dataset.test.train", "dataset.classes=2", "dataset.shape=[4]"]
    words += ["dataset.mean=null", "dataset.std=null", "trainer.precision=fp64"]
    words += [f"model._target_={__name__}.Growing", "~model.shape", "~model.classes"]
    ((found, draws, _),) = in_world(1, checked, composed("model=linear", *words), tmp_path)
    assert draws.samples == drawn
    assert draws.outputs
    assert found.unused == ["spare.weight", "spare.bias"]
    assert found.trained == 10
    assert found.nbytes == {"parameters": 16 * 8, "gradients": 10 * 8, "optimizer state": 10 * 8}
