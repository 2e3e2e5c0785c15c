"""How often `sweep.search=race` is wrong, and how many trainings it takes, against a fixed number of seeds.

python bench/sweep_race.py [--races=100000] [--only=equal,planted] [--pool=FILE]

Simulated races, with the evidence and the threshold of lockstep.sweeps.race. "equal" counts the races of equal settings
that name a winner. "planted" compares trainings: a fixed number of seeds is evaluated once, by paired t-tests of the
same error probability; it is the smallest one that finds the best setting in 9 of 10 races, and so is the limit of the
race. With --pool the objectives are those of real trainings: a file with a number in each line, one for each seed.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lockstep.sweeps.race import log_evidence, threshold

CONFIDENCE, POWER, CHUNK = 0.99, 0.9, 5000
Array = NDArray[np.float64]
Draw = Callable[[tuple[int, int, int]], Array]
"""Objectives of (races, settings, seeds), higher ones are better."""


def race(values: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each race and number of seeds up to which it may go: (the winner or -1, the trainings it has taken).

    values: (races, settings, seeds).
    """
    races, settings, seeds = values.shape
    limit = threshold(settings, CONFIDENCE)
    total = np.zeros((races, settings, settings))
    squares = np.zeros_like(total)
    left = np.ones((races, settings), bool)
    winner = np.full((races, seeds), -1)
    trained = np.zeros((races, seeds), int)
    for seed in range(seeds):
        running = left.sum(1) > 1
        trained[:, seed] = (trained[:, seed - 1] if seed else 0) + np.where(running, left.sum(1), 0)
        difference = values[:, :, None, seed] - values[:, None, :, seed]
        total += difference
        squares += difference**2
        beats = np.zeros((races, settings, settings), bool)
        beats[running] = log_evidence(seed + 1, total[running], squares[running]) >= limit
        left &= ~(beats & left[:, :, None]).any(1)
        winner[:, seed] = np.where(left.sum(1) == 1, left.argmax(1), -1)
    return winner, trained


def fixed(values: Array) -> NDArray[np.int64]:
    """For each race and number of seeds: the setting that paired t-tests on all these seeds show to be the best, or -1.

    The level of a test is that of the race: half of the error probability, divided by the number of other settings.
    """
    races, settings, seeds = values.shape
    count = np.arange(1, seeds + 1)
    critical = stats.t.isf((1 - CONFIDENCE) / 2 / (settings - 1), np.maximum(count - 1, 1))
    wins = np.ones((races, settings, seeds), bool)
    for one in range(settings):
        for other in range(settings):
            if one != other:
                difference = values[:, one] - values[:, other]
                mean = difference.cumsum(1) / count
                variance = np.maximum((difference**2).cumsum(1) / count - mean**2, 0) * count / np.maximum(count - 1, 1)
                wins[:, one] &= (mean * np.sqrt(count) > critical * np.sqrt(variance)) & (count > 1)
    return np.where(wins.any(1), wins.argmax(1), -1)


def in_chunks(count: int, draw: Draw, settings: int, seeds: int, *functions: Callable[[Array], Any]) -> list[Any]:
    """What each function returns for `count` races, a part of them at a time."""
    parts = []
    for begin in range(0, count, CHUNK):
        values = draw((min(CHUNK, count - begin), settings, seeds))
        parts.append([function(values) for function in functions])
    return list(zip(*parts, strict=True))


def equal(count: int, draws: dict[str, Draw]) -> str:
    """How many races of equal settings name a winner."""
    rows = []
    for name, draw in draws.items():
        for settings, seeds in ((2, 100), (6, 40)):
            (parts,) = in_chunks(count, draw, settings, seeds, race)
            named = sum(int((winner[:, -1] >= 0).sum()) for winner, _ in parts)
            rows.append([name, settings, seeds, count, named, f"{100 * named / count:.2f} %"])
    return harness.table(["noise", "settings", "seeds at most", "races", "name a winner", "share"], rows)


def planted(count: int, chance: np.random.Generator) -> str:
    """Trainings until the best setting is found. Leads are in standard deviations of one setting over the seeds."""
    leads = {
        "2 settings, lead 1.41 (1 of the differences)": [2**0.5, 0],
        "2 settings, lead 1": [1, 0],
        "2 settings, lead 2": [2, 0],
        "6 settings, lead 1 over five equal ones": [1, 0, 0, 0, 0, 0],
        "6 settings, 1 apart": [0, -1, -2, -3, -4, -5],
        "6 settings, 1 ahead of one, 3 of the others": [0, -1, -3, -3, -3, -3],
        "16 settings, 1 apart": list(range(0, -16, -1)),
    }
    rows = []
    for name, means in leads.items():
        shift = np.array(means, float)[None, :, None]
        seeds, races = 110, count if len(means) < 10 else count // 4
        draw = lambda shape, shift=shift: chance.standard_normal(shape) + shift  # noqa: E731
        raced, at_once = in_chunks(races, draw, len(means), seeds, race, fixed)
        winner, trained = (np.concatenate(part) for part in zip(*raced, strict=True))
        best = np.concatenate(at_once)
        needed = int((np.mean(best == 0, axis=0) >= POWER).argmax()) + 1
        limit = int((np.mean(winner == 0, axis=0) >= POWER).argmax())
        took, whole = float(trained[:, limit].mean()), needed * len(means)
        wrong = 100 * float((winner[:, -1] > 0).mean())
        unlimited = f"{trained[:, -1].mean():.0f} (finds {100 * (winner[:, -1] == 0).mean():.1f} %)"
        rows.append([name, f"{needed} x {len(means)} = {whole}", f"{took:.1f}", limit + 1, f"{took / whole:.2f}"])
        rows[-1] += [unlimited, f"{wrong:.2f} %"]
    head = ["planted", "fixed: trainings", "race: trainings", "seeds at most", "ratio", f"up to {seeds} seeds", "wrong"]
    return harness.table(head, rows)


def noises(chance: np.random.Generator) -> dict[str, Draw]:
    return {
        "normal": chance.standard_normal,
        "three values": lambda shape: chance.integers(-1, 2, shape).astype(float),
        "t with 2 degrees of freedom": lambda shape: chance.standard_t(2, shape),
        "one in ten diverges": lambda shape: chance.standard_normal(shape) - 100.0 * (chance.random(shape) < 0.1),
    }


def drawn_from(path: Path, chance: np.random.Generator) -> Draw:
    """Real objectives: each race gets different trainings of the pool, two races may share some."""
    pool = np.array([float(line) for line in path.read_text().split()])

    def draw(shape: tuple[int, int, int]) -> Array:
        size = shape[1] * shape[2]
        return np.stack([chance.choice(pool, size, replace=False) for _ in range(shape[0])]).reshape(shape)

    return draw


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--races", type=int, default=100_000)
    arguments.add_argument("--only", default="equal,planted")
    arguments.add_argument("--pool", type=Path)
    asked = arguments.parse_args()
    chance = np.random.default_rng(0)
    if "equal" in asked.only:
        draws = {f"real: {asked.pool.name}": drawn_from(asked.pool, chance)} if asked.pool else noises(chance)
        print(equal(asked.races, draws), end="\n\n", flush=True)
    if "planted" in asked.only:
        print(planted(asked.races // 5, chance))


if __name__ == "__main__":
    main()
