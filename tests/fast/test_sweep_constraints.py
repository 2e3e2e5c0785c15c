"""Constraints of a sweep: what they allow, what they refuse to read, and that every search draws by them."""

import random
from collections.abc import Mapping, Sequence

import pytest

from lockstep.errors import ConfigError
from lockstep.sweeps.search import Choices, Constraint, draw, interval, make_plan
from lockstep.sweeps.table import Row
from lockstep.sweeps.tpe import suggest
from support.sweep_tables import settings

JOB = {"optimizer.lr": 0.1, "trainer.epochs": 9, "seed": 3, "scheduler": None, "sync": True}
SPACE = {"lr": interval("lr", 0.001, 1.0, {"log"}), "size": Choices(("16", "32", "64"))}


def small(values: Mapping[str, str]) -> bool:
    return Constraint("lr * size <= 4").holds({key: float(word) for key, word in values.items()})


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("optimizer.lr * trainer.epochs <= 1", True),
        ("optimizer.lr * trainer.epochs + 0.2 <= 1", False),
        ("(trainer.epochs - 1) / 2 == seed + 1", True),
        ("-seed < 0 < seed < trainer.epochs", True),
        ("1 < seed < 2", False),
        ("seed != 3", False),
        ("1 - 2 * 3 >= -5", True),
    ],
)
def test_a_constraint_is_arithmetic(text, holds):
    assert Constraint(text).holds(JOB) is holds


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("__import__('os').system('true') < 1", "cannot be read: __import__('os').system('true'); type keys, numbers"),
        ("seed ** 9 < 1", "cannot be read: seed ** 9; type"),
        ("seed[0] < 1", "cannot be read: seed[0]; type"),
        ("'a' < 1", "cannot be read: 'a'; type"),
        ("True < seed", "cannot be read: True; type"),
        ("seed in (1, 2)", "cannot be read; type"),
        ("seed <", "cannot be read; type"),
        ("", "cannot be read; type"),
        ("seed", "compares nothing; type"),
        ("sed < 4", "names sed, which is no key of a job; type"),
        ("scheduler < 4", "needs a number, and scheduler is None; type scheduler=<a number>"),
        ("sync < 4", "needs a number, and sync is True; type"),
        ("1 / (seed - 3) < 4", "cannot be computed (division by zero); type"),
    ],
)
def test_anything_else_is_refused_in_a_sentence(text, sentence):
    with pytest.raises(ConfigError) as error:
        Constraint(text).holds(JOB)
    assert f"sweep.constraints: {text} {sentence}" in str(error.value)


def test_random_values_are_drawn_again_until_they_are_allowed():
    drawn = [draw(SPACE, 0, number, small) for number in range(100)]
    assert all(small(values) for values in drawn)
    free = [draw(SPACE, 0, number) for number in range(100)]
    assert 50 < sum(map(small, free)) < 100
    assert all(values == other for values, other in zip(free, drawn, strict=True) if small(values))
    with pytest.raises(ConfigError, match="refuse 200 draws in a row; type other limits"):
        draw(SPACE, 0, 0, lambda values: False)


def test_tpe_draws_what_is_allowed():
    """The larger lr * size, the better: the best of the rows are at the limit of the constraint."""
    pytest.importorskip("optuna")
    chance = random.Random(0)
    rows = []
    for number in range(30):
        values = {key: parameter.draw(chance) for key, parameter in SPACE.items()}
        if small(values):
            value = float(values["lr"]) * float(values["size"])
            rows.append(Row(number, " ".join(f"{key}={word}" for key, word in values.items()), "", objective=value))
    free = [suggest(SPACE, rows, 0, number, "max") for number in range(20)]
    drawn = [suggest(SPACE, rows, 0, number, "max", small) for number in range(20)]
    assert not all(map(small, free))
    assert all(map(small, drawn))


@pytest.mark.parametrize(
    ("search", "trials"), [("list", None), ("halving", None), ("halving", 6), ("random", 6), ("tpe", 6)]
)
def test_every_search_plans_by_its_constraints(search, trials):
    if search == "tpe":
        pytest.importorskip("optuna")
    every = [[f"lr={rate}", f"size={size}"] for rate in ("0.01", "0.1", "1") for size in (16, 32, 64)]

    def allows(words: Sequence[str]) -> bool:
        return small(dict(word.split("=") for word in words))

    plan = make_plan(settings(search=search, trials=trials), [], lambda: every, lambda: SPACE, allows)
    assert plan.lists
    assert all(allows(words) for words in plan.lists)
    if trials is None:
        assert (len(plan.lists), plan.left_out) == (5, 4)
        with pytest.raises(ConfigError, match="refuse all 9 jobs; type other values"):
            make_plan(settings(search=search, trials=trials), [], lambda: every, lambda: SPACE, lambda words: False)
    if search == "tpe":
        assert not plan.allows({"lr": "1", "size": "16"})
        assert plan.allows({"lr": "0.1", "size": "16"})
