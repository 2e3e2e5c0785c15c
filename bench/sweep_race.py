"""How often `sweep.search=race` is wrong, and how many trainings it takes, against a fixed number of seeds.

python bench/sweep_race.py [--races=100000] [--only=equal,planted,real]

Simulated races, with the evidence and the threshold of lockstep.sweeps.race. "equal" counts the races of equal settings
that name a winner. "planted" compares trainings: a fixed number of seeds is evaluated once, by paired t-tests of the
same error probability; it is the smallest one that finds the best setting in 9 of 10 races, and so is the limit of the
race. "real" has real trainings of a linear model on the digits: 200 races of equal settings, and the gain of pairs.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lockstep.sweeps.race import log_evidence, threshold
from lockstep.sweeps.table import read_table

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


def digits_trainings(seeds: Sequence[int], lr: float) -> tuple[Array, Array]:
    """Test accuracy and -loss of `model=linear dataset.validation=null trainer.epochs=1 optimizer.lr=<lr> seed=...`.

    The same trainings in plain torch, hundreds at once: 0.7 ms of a core each.
    """
    import torch
    from torch.nn import functional as F

    from lockstep.data.builtin import digits
    from lockstep.data.partition import generator

    (x, y), (tested, labels) = ([torch.stack(t) for t in zip(*map(data.__getitem__, range(len(data))), strict=True)]
                                for data in (digits(True), digits(False)))  # fmt: skip
    x, tested = (((images.flatten(1) / 255) - 0.287) / 0.353 for images in (x, tested))
    weights, order = [], []
    for seed in seeds:
        torch.manual_seed(seed)
        layer = torch.nn.Linear(64, 10)
        weights.append(torch.cat([layer.weight.detach(), layer.bias.detach()[:, None]], 1))
        order.append(torch.randperm(len(x), generator=generator(seed, 0)))
    one, batches = torch.ones(1), list(torch.stack(order).split(64, 1))
    x, tested = (torch.cat([images, one.expand(len(images), 1)], 1) for images in (x, tested))
    w, momentum, warmup = torch.stack(weights), torch.zeros(len(seeds), 10, 65), len(batches) // 2
    for step, batch in enumerate(batches):
        done = (step - warmup) / (len(batches) - warmup)
        factor = (step + 1) / warmup if step < warmup else (1 + np.cos(np.pi * done)) / 2
        error = torch.softmax(torch.bmm(x[batch], w.transpose(1, 2)), -1) - F.one_hot(y[batch], 10)
        momentum = 0.9 * momentum + torch.bmm(error.transpose(1, 2), x[batch]) / batch.shape[1]
        w -= lr * factor * momentum
    logits = torch.einsum("nd,skd->snk", tested, w)
    accuracy = (logits.argmax(-1) == labels).double().mean(1)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(seeds)), reduction="none").view(len(seeds), -1)
    return accuracy.numpy(), -loss.double().mean(1).numpy()


def trainings(first: int, count: int, lr: float) -> Array:
    """(2, count): accuracies and negative losses of the trainings with these seeds."""
    parts = [
        digits_trainings(range(seed, min(seed + 500, first + count)), lr) for seed in range(first, first + count, 500)
    ]
    return np.concatenate([np.stack(part) for part in parts], axis=1)


def real(races: int, seeds: int = 50, checked: int = 10) -> str:
    """Races of equal settings on real trainings, no two of which share one, and what equal seeds are worth in pairs.

    The second setting has other seeds than the first: with equal ones the two would return the same bits.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "model=linear",
            "trainer.epochs=1",
            "logger=[]",
            "optimizer.lr=0.1",
            "dataset.validation=null",
            f"hydra.sweep.dir={folder}/s",
        ]
        command = [sys.executable, harness.TRAIN, "-m", *words, f"seed=range(0,{checked})"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        accuracies = [row.test for row in read_table(Path(folder, "s"))]
    same = int(np.sum(np.isclose(trainings(0, checked, 0.1)[0], accuracies, rtol=0, atol=1e-9)))
    lines = [f"{same} of {checked} accuracies are those of src/train.py", ""]
    first, second = (trainings(begin, races * seeds, 0.1).reshape(2, races, seeds) for begin in (10**5, 10**6))
    for name, one, other in zip(("accuracy", "loss"), first, second, strict=True):
        winner, _ = race(np.stack([one, other], 1))
        lines.append(f"{name}: {(winner[:, -1] >= 0).sum()} of {races} races of equal settings name a winner")
    rows = []
    base = trainings(1000, 2000, 0.1)
    for lr in (0.02, 0.05, 0.11, 0.2):
        for name, one, other in zip(("accuracy", "loss"), base, trainings(1000, 2000, lr), strict=True):
            paired, unpaired = (other - one).std(), (np.roll(other, 1) - one).std()
            row = [f"0.1 and {lr}", name, f"{np.corrcoef(one, other)[0, 1]:.2f}", f"{paired:.4f}", f"{unpaired:.4f}"]
            rows.append([*row, f"{(unpaired / paired) ** 2:.1f}"])
    head = ["optimizer.lr", "of", "correlation", "deviation, same seeds", "other seeds", "times the pairs"]
    return "\n".join([*lines, "", harness.table(head, rows)])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--races", type=int, default=100_000)
    arguments.add_argument("--only", default="equal,planted,real")
    asked = arguments.parse_args()
    chance = np.random.default_rng(0)
    if "equal" in asked.only:
        print(equal(asked.races, noises(chance)), end="\n\n", flush=True)
    if "planted" in asked.only:
        print(planted(asked.races // 5, chance), end="\n\n", flush=True)
    if "real" in asked.only:
        print(real(races=200))


if __name__ == "__main__":
    main()
