"""The values that a search draws: their limits, their spread, and that they depend on the seed and the number alone."""

import math
import random

import pytest

from lockstep.errors import ConfigError
from lockstep.sweeps.search import Choices, Numbers, draw, interval, limits_of
from lockstep.sweeps.table import Row
from lockstep.sweeps.tpe import suggest

SPACE = {
    "lr": interval("lr", 0.001, 1.0, {"log"}),
    "size": interval("size", 16, 64, set()),
    "model": Choices(("a", "b")),
}


def test_drawn_values_keep_their_limits_and_are_spread_by_their_logarithm():
    drawn = [draw(SPACE, 0, number) for number in range(300)]
    rates = [float(values["lr"]) for values in drawn]
    assert all(0.001 <= rate <= 1.0 for rate in rates)
    assert sum(rate < math.sqrt(0.001) for rate in rates) == pytest.approx(150, abs=30)
    assert {values["size"] for values in drawn} == {str(size) for size in range(16, 65)}
    assert {values["model"] for values in drawn} == {"a", "b"}
    assert all(len(values["lr"]) <= 11 for values in drawn)  # 6 digits


def test_a_draw_depends_on_the_seed_and_the_number_alone():
    assert draw(SPACE, 0, 7) == draw(SPACE, 0, 7)
    assert len({draw(SPACE, seed, number)["lr"] for seed in (0, 1) for number in range(9)}) == 18


def test_a_rounded_number_keeps_its_limits():
    third = Numbers(0.1, 1 / 3, log=False, whole=False)
    assert third.word(1 / 3) == "0.333333"
    assert Numbers(1 / 3, 1, log=False, whole=False).word(1 / 3) == str(1 / 3)


def test_the_limits_of_a_space_are_a_few_jobs():
    words = [tuple(values.values()) for values in limits_of(SPACE | {"model": Choices(("a", "b", "c"))})]
    assert words == [("0.001", "16", "a"), ("1.0", "64", "b"), ("0.001", "16", "c")]


@pytest.mark.parametrize(
    ("low", "high", "tags", "sentence"),
    [
        (1.0, 0.1, set(), "lr=interval(1.0,0.1) must have the smaller limit first; type lr=interval(0.1,1.0)"),
        (0.0, 0.1, {"log"}, "lr=tag(log,interval(0.0,0.1)) must have limits above 0; type lr=interval(0.0,0.1)"),
        (0.1, 1.0, {"lgo"}, "has an unknown tag; type lr=tag(log,interval(0.1,1.0))"),
    ],
)
def test_wrong_intervals_are_refused(low, high, tags, sentence):
    with pytest.raises(ConfigError) as error:
        interval("lr", low, high, tags)
    assert sentence in str(error.value)


def test_tpe_draws_where_the_results_were_good():
    """Of 30 results the best are near lr=0.1 with model b."""
    pytest.importorskip("optuna")
    chance = random.Random(0)
    rows = []
    for number in range(30):
        values = {key: parameter.draw(chance) for key, parameter in SPACE.items()}
        loss = abs(math.log10(float(values["lr"])) + 1) + (values["model"] == "a")
        rows.append(Row(number, " ".join(f"{key}={word}" for key, word in values.items()), "", objective=loss))
    drawn = [suggest(SPACE, rows, 0, number, "min") for number in range(30, 40)]
    assert sum(values["model"] == "b" for values in drawn) >= 8
    assert sum(0.03 < float(values["lr"]) < 0.3 for values in drawn) >= 7
    assert suggest(SPACE, rows, 0, 30, "min") == drawn[0]
    nan = Row(30, rows[0].overrides, "", objective=math.nan)  # counts for nothing
    assert suggest(SPACE, [*rows, nan], 0, 30, "min") == drawn[0]
    worst = [suggest(SPACE, rows, 0, number, "max") for number in range(30, 40)]
    assert sum(values["model"] == "a" for values in worst) >= 8
