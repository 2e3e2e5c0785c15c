"""The tables of `make bench`: ratios between runs of the same round."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness import processor, spread, table

PRECISIONS = {"fp32": "Lockstep", "bf16": "Lockstep, bf16"}
OTHERS = ("Lightning", "Accelerate", "references")
LAUNCHES = ("torchrun", "launch=torchrun", "launch=spawn", "launch=fork")
CROWD = 8  # ranks whose memory is measured
FLOORS = {"bare loop": 1, "bare DDP": 2, "no synchronisation": 2}  # {floor: processes}
# {how Lockstep runs beside its floors: its overrides}; gloo instead of what gradient_sync=auto takes
BESIDE = {precision: [f"trainer.precision={precision}"] for precision in PRECISIONS}
BESIDE |= {f"{how}, gloo": [*words, "gradient_sync=all_reduce"] for how, words in BESIDE.items()}


def beside(how: str) -> str:
    """The name of Lockstep that runs beside its floors."""
    return f"Lockstep beside its floor, {how}"


def processes(ranks: int) -> str:
    return f"{ranks} process" if ranks == 1 else f"{ranks} processes"


class Results:
    """The runs so far, [{"round", "name", "ranks", quantity: number, ...}], and the ratios between them."""

    def __init__(self, runs: Sequence[Mapping[str, Any]]) -> None:
        self.runs = runs
        self.worlds = sorted({run["ranks"] for run in runs if run["name"] == "minimal"})
        self.commands = next((run["name"] for run in runs if run["name"].endswith(" commands")), "")

    def by_round(self, name: str, ranks: int, quantity: str) -> dict[int, float]:
        mine = [run for run in self.runs if (run["name"], run["ranks"]) == (name, ranks)]
        return {run["round"]: run[quantity] for run in mine if quantity in run}

    def values(self, name: str, ranks: int, quantity: str) -> list[float]:
        return list(self.by_round(name, ranks, quantity).values())

    def median(self, name: str, ranks: int, quantity: str, digits: int = 0) -> str:
        values = self.values(name, ranks, quantity)
        return f"{statistics.median(values):.{digits}f}" if values else "-"

    def ratio(self, quantity: str, top: tuple[str, int], bottom: tuple[str, int]) -> list[float]:
        """The ratios of the rounds that both (name, ranks) ran in."""
        one, other = self.by_round(*top, quantity), self.by_round(*bottom, quantity)
        return [one[number] / other[number] for number in one if number in other]


def figures(records: Sequence[dict[str, Any]], began: float) -> dict[str, float]:
    """{quantity: number} from the ranks' records: a time is the slowest rank's, CPU time is the sum over ranks.

    speed, first_epoch, later_epochs, evaluation: samples/s. cpu: CPU seconds for 1000 training samples. first_step:
    seconds from the command. rss, private, pss: MB of the rank that has most. of <floor>: of its speed, the median of
    all epochs.
    """

    def total(what: str, key: str, over: Any, epochs: slice = slice(None)) -> float:
        laps = zip(*(record[what][epochs] for record in records), strict=True)
        return sum(over(lap[key] for lap in ranks) for ranks in laps)

    found = {"first_step": max(record["first_step"] for record in records) - began}
    epochs = {"speed": slice(None), "first_epoch": slice(1), "later_epochs": slice(1, None)}
    for quantity, some in epochs.items():
        if samples := total("training", "samples", max, some):
            found[quantity] = samples / total("training", "seconds", max, some)
    if samples := total("training", "samples", max):
        found["cpu"] = 1000 * total("training", "cpu", sum) / samples
    evaluation = records[0]["evaluation"]  # rank 0 has the metrics only when all ranks have evaluated
    if evaluation:
        found["evaluation"] = sum(lap["samples"] for lap in evaluation) / sum(lap["seconds"] for lap in evaluation)
    for name in FLOORS.keys() & records[0].keys():
        each = [slice(epoch, epoch + 1) for epoch in range(len(records[0][name]))]
        shares = [total(name, "seconds", max, epoch) / total("training", "seconds", max, epoch) for epoch in each]
        found[f"of {name}"] = statistics.median(shares)
    found |= {key: max(record[key] for record in records) for key in ("rss", "private", "pss") if key in records[0]}
    if records[0]["accuracy"] is not None:
        found["accuracy"] = records[0]["accuracy"]
    return found


def section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A heading and a table, of the rows whose last column was measured; nothing without any."""
    rows = [row for row in rows if row[-1] != "-"]
    return f"## {title}\n\n{table(head, rows)}" if rows else ""


def training(results: Results, ranks: int) -> str:
    rows = []
    for other in ("tutorial", *OTHERS):
        for precision, ours in PRECISIONS.items():
            quantities = ("speed", "first_epoch", "later_epochs", "evaluation")
            faster = [results.ratio(quantity, (ours, ranks), (other, ranks)) for quantity in quantities]
            shorter = [results.ratio(quantity, (other, ranks), (ours, ranks)) for quantity in ("cpu", "wall")]
            speeds = [results.median(name, ranks, "speed") for name in (other, ours)]
            rows.append([other, precision, *speeds, *map(spread, faster + shorter)])
    head = ["against", "Lockstep in", "its samples/s", "Lockstep's", "training", "first epoch", "later epochs",
            "evaluation", "CPU time", "whole command"]  # fmt: skip
    return section(f"Training over {processes(ranks)}: how many times as fast Lockstep is", head, rows)


def floors(results: Results) -> str:
    rows = []
    for name, ranks in FLOORS.items():
        for how in BESIDE:
            kept = results.values(beside(how), ranks, f"of {name}")
            rows.append([name, str(ranks), how, results.median(beside(how), ranks, "speed"), spread(kept)])
    head = ["of the speed of", "processes", "Lockstep in", "its samples/s", "fraction kept"]
    return section("The floors, in turns in the same processes", head, rows)


def startup(results: Results) -> str:
    rows = []
    for ranks in results.worlds:
        for name in ("minimal", *(f"start by {way}" for way in ("python", *LAUNCHES))):
            seconds = spread(results.values(name, ranks, "first_step"))
            against = [results.ratio("first_step", (name, ranks), ("minimal", size)) for size in (ranks, 1)]
            rows.append([name, str(ranks), *map(spread, against), seconds])
    head = ["", "ranks", "against the minimal script on as many ranks", "against it alone", "seconds to the first step"]
    return section("Start-up: from the command to the end of the first optimizer step", head, rows)


def sweep(results: Results) -> str:
    names = [results.commands, "sweep by launch=torchrun", "sweep by launch=fork"]
    rows = []
    for name in names:
        ratios = results.ratio("wall", (name, 2), (results.commands, 2))
        rows.append([name, spread(ratios), spread(results.values(name, 2, "wall"), 1)])
    return section("A sweep of short jobs over 2 ranks", ["", "of the single commands", "seconds"], rows)


def memory(results: Results) -> str:
    rows = []
    for ranks in (1, 2, CROWD):
        for name in ("tutorial", "Lockstep", "Lockstep by torchrun", "Lockstep by launch=fork"):
            megabytes = [results.median(name, ranks, key) for key in ("rss", "private", "pss")]
            rows.append(
                [name, str(ranks), *megabytes, spread(results.ratio("rss", (name, ranks), ("tutorial", ranks)))]
            )
    head = ["", "ranks", "peak RSS, MB", "private, MB", "PSS, MB", "peak RSS of the tutorial's"]
    return section("Memory of the rank that has most", head, rows)


def answers(results: Results) -> str:
    rows = [[name, spread(results.values(name, 1, "wall"))] for name in ("--help", "--cfg job")]
    return section("--help and --cfg", ["", "seconds"], rows)


def report(runs: Sequence[Mapping[str, Any]], settings: Any, versions: str) -> str:
    """The whole page, in Markdown."""
    results = Results(runs)
    rounds = 1 + max((run["round"] for run in runs), default=0)
    about = (
        f"{settings.samples} training and {settings.test_samples} test samples of MNIST, batch {settings.batch} "
        f"a rank, {settings.epochs} epochs; up to {rounds} rounds; median (smallest-largest) of paired runs. Above 1 "
        "Lockstep is better in speeds, CPU time and wall time. Lockstep runs with sync_bn=off, because no contender "
        f"synchronises batch norm.\n\n{processor()}, load before the runs "
        f"{spread([run['load'] for run in runs], 1)}; {versions}.\n"
    )
    late = [f"{run['name']} over {run['ranks']} (exit {run['exit']})" for run in runs if run["exit"]]
    if late:
        about += f"\nEnded with an error after all was measured: {', '.join(late)}.\n"
    parts = [
        training(results, 1),
        training(results, 2),
        floors(results),
        startup(results),
        sweep(results),
        memory(results),
    ]
    parts.append(answers(results))
    return f"# Lockstep against the others\n\n{about}\n" + "\n".join(part for part in parts if part)
