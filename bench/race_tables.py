"""The tables of `make bench`: medians of the rounds, and ratios between runs of the same round."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from operator import truediv
from typing import Any

from harness import processor, spread, table

from lockstep.distributed.host import has_native_bf16

Entry = tuple[str, int]
"""(name, ranks) of a contender"""
PRECISIONS = {"fp32": "Lockstep", "bf16": "Lockstep, bf16"}
WRITERS = {precision: f"{name}, GPT" for precision, name in PRECISIONS.items()}
WINDOWS_A_STEP = 12  # of 64 characters, so that a ratio of samples/s is one of tokens/s
OTHERS = ("tutorial", "Lightning", "Accelerate", "references")
LAUNCHES = ("torchrun", "launch=torchrun", "launch=spawn", "launch=fork")
CROWD = 8  # ranks whose memory is measured
FLOORS = {"bare loop": 1, "bare DDP": 2, "no synchronisation": 2}  # {floor: processes}
# {how Lockstep runs beside its floors: its overrides}; gloo instead of what gradient_sync=auto takes
BESIDE = {precision: [f"trainer.precision={precision}"] for precision in PRECISIONS}
BESIDE |= {f"{how}, gloo": [*words, "gradient_sync=all_reduce"] for how, words in BESIDE.items()}
NETS = ("ResNet-18", "GPT")  # larger ones than the contenders'


def beside(how: str) -> str:
    """The name of Lockstep that runs beside its floors. how: of BESIDE or NETS."""
    return f"Lockstep beside its floor, {how}"


Runs = Sequence[Mapping[str, Any]]
"""[{"round", "name", "ranks", quantity: number, ...}, ...]"""
HEADS = {"speed": "samples/s", "evaluation": "evaluation, samples/s", "cpu": "CPU s of 1000 samples", "wall": "seconds",
         "first_step": "seconds to the first step", "rss": "peak RSS, MB", "private": "private, MB",
         "pss": "PSS, MB"}  # fmt: skip


def by_round(runs: Runs, quantity: str, entry: Entry) -> dict[int, float]:
    mine = [run for run in runs if (run["name"], run["ranks"]) == entry]
    return {run["round"]: run[quantity] for run in mine if quantity in run}


def section(runs: Runs, title: str, quantities: Sequence[str], pairs: Sequence[tuple[Entry, Entry | None]]) -> str:
    """A heading and a table: what each pair's first entry measured, and its ratios to the second in shared rounds.

    Entries without a figure are left out; nothing without any.
    """
    rows = []
    for entry, other in pairs:
        row = [*entry, *(other or ())]
        for quantity in quantities:
            mine = by_round(runs, quantity, entry)
            row.append(spread(list(mine.values())))
            if other:
                theirs = by_round(runs, quantity, other)
                row.append(spread([mine[number] / theirs[number] for number in mine if number in theirs]))
        if any(by_round(runs, quantity, entry) for quantity in quantities):
            rows.append(row)
    if not rows:
        return ""
    head = ["", "ranks", *(["against", "ranks"] if pairs[0][1] else [])]
    for quantity in quantities:
        head += [HEADS.get(quantity, quantity), *(["ratio"] if pairs[0][1] else [])]
    return f"## {title}\n\n{table(head, rows)}"


def figures(records: Sequence[dict[str, Any]], began: float) -> dict[str, float]:
    """{quantity: number} from the ranks' records: a time is the slowest rank's, CPU time is the sum over ranks.

    speed, evaluation: samples/s. cpu: CPU seconds for 1000 training samples. first_step: seconds from the command.
    rss, private, pss: MB of the rank that has most. of <floor>: of its speed, the median of all epochs.
    """
    found = {"first_step": max(record["first_step"] for record in records) - began}
    laps = list(zip(*(record["training"] for record in records), strict=True))
    seconds = [max(lap["seconds"] for lap in ranks) for ranks in laps]
    if laps:
        samples = sum(ranks[0]["samples"] for ranks in laps)
        found["speed"] = samples / sum(seconds)
        found["cpu"] = 1000 * sum(lap["cpu"] for ranks in laps for lap in ranks) / samples
    evaluation = records[0]["evaluation"]  # rank 0 has the metrics only when all ranks have evaluated
    if evaluation:
        found["evaluation"] = sum(lap["samples"] for lap in evaluation) / sum(lap["seconds"] for lap in evaluation)
    for name in FLOORS.keys() & records[0].keys():
        floor = [
            max(lap["seconds"] for lap in ranks) for ranks in zip(*(record[name] for record in records), strict=True)
        ]
        found[f"of {name}"] = statistics.median(map(truediv, floor, seconds))
    found |= {key: max(record[key] for record in records) for key in ("rss", "private", "pss") if key in records[0]}
    if records[0]["accuracy"] is not None:
        found["accuracy"] = records[0]["accuracy"]
    return found


def sections(runs: Runs) -> Iterable[str]:
    """All tables. A ratio is the first contender's figure over the other's."""
    for ranks in (1, 2):
        pairs = [((ours, ranks), (other, ranks)) for other in OTHERS for ours in PRECISIONS.values()]
        yield section(runs, f"Training, processes: {ranks}", ("speed", "evaluation", "cpu", "wall"), pairs)
    pairs = [((name, 1), ("nanoGPT", 1)) for name in WRITERS.values()]
    yield section(runs, "A GPT on 64 characters a sample", ("speed", "cpu", "first_step", "rss"), pairs)
    for floor, ranks in FLOORS.items():
        alone = [((beside(how), ranks), None) for how in (*BESIDE, *NETS)]
        yield section(runs, f"In turns with {floor}: the fraction kept", ("speed", f"of {floor}"), alone)
    starts = ["minimal", *(f"start by {way}" for way in ("python", *LAUNCHES))]
    worlds = sorted({run["ranks"] for run in runs if run["name"] == "minimal"})
    pairs = [((name, ranks), ("minimal", size)) for ranks in worlds for size in {1, ranks} for name in starts]
    yield section(runs, "From the command to the end of the first step", ("first_step",), pairs)
    commands = [run["name"] for run in runs if run["name"].endswith(" commands")][:1]
    pairs = [((f"sweep by {way}", 2), (name, 2)) for name in commands for way in ("launch=torchrun", "launch=fork")]
    yield section(runs, "A sweep of short jobs", ("wall",), pairs)
    names = ("Lockstep", "Lockstep by torchrun", "Lockstep by launch=fork")
    pairs = [((name, ranks), ("tutorial", ranks)) for ranks in (1, 2, CROWD) for name in names]
    yield section(runs, "Memory of the rank that has most", ("rss", "private", "pss"), pairs)
    yield section(runs, "--help and --cfg", ("wall",), [((name, 1), None) for name in ("--help", "--cfg job")])


def report(runs: Runs, settings: Any, versions: str) -> str:
    """The whole page, in Markdown."""
    about = (
        f"{settings.samples} training and {settings.test_samples} test samples of MNIST, batch {settings.batch} "
        f"a rank, {settings.epochs} epochs; median (smallest-largest) of paired runs. A ratio is the first over the "
        "other. Lockstep runs with sync_bn=off, because no contender synchronises batch norm."
        f"\n\n{processor()}, load before the runs {spread([run['load'] for run in runs])}; {versions}.\n"
    )
    if not has_native_bf16():
        about += "\nNot run: bf16, which this CPU does not compute natively.\n"
    late = [f"{run['name']} over {run['ranks']} (exit {run['exit']})" for run in runs if run["exit"]]
    if late:
        about += f"\nEnded with an error after all was measured: {', '.join(late)}.\n"
    return f"# Lockstep against the others\n\n{about}\n" + "\n".join(filter(None, sections(runs)))
