"""`make bench`: Lockstep against what one would run otherwise, in turns: the same model, data, batch and samples.

python bench/race.py [--quick] [--rounds=4] [--only=train,floor,nets,text,startup,sweep,memory,help]

Every contender (bench/contenders/) is a command started as its users start it. Lockstep is src/train.py with its
defaults: Hydra, TensorBoard, progress bar, metrics and snapshots are on. Only sync_bn=off is passed, because no
contender synchronises batch norm. Tables, the figures of every run and its console go to outputs/bench/<time>/.
"""

import argparse
import csv
import importlib.metadata
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import Any

import harness
from harness import CONTENDERS, ROOT, TRAIN, processor, spread, table

from lockstep.distributed.host import has_native_bf16

PYTHON = [sys.executable]
ACCELERATE = [*PYTHON, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1",
              "--mixed_precision=no", "--dynamo_backend=no"]  # fmt: skip
PARTS = ("train", "floor", "nets", "text", "startup", "sweep", "memory", "help")
SLOW_PARTS = {"nets", "startup", "sweep", "memory"}  # run in half of the rounds
PRECISIONS = {"fp32": "Lockstep", "bf16": "Lockstep, bf16"}
OTHERS = ("tutorial", "Lightning", "Accelerate", "references")
LAUNCHES = ("torchrun", "launch=torchrun", "launch=spawn", "launch=fork")
CROWD = 8  # ranks whose memory is measured
WINDOWS_A_STEP = 12  # of 64 characters, so that a ratio of samples/s is one of tokens/s
FLOORS = {"bare loop": 1, "bare DDP": 2, "no synchronisation": 2}  # {floor: processes}
# {how Lockstep runs beside its floors: its overrides}; gloo instead of what gradient_sync=auto takes
BESIDE = {precision: [f"trainer.precision={precision}"] for precision in PRECISIONS}
BESIDE |= {f"{how}, gloo": [*words, "gradient_sync=all_reduce"] for how, words in BESIDE.items()}
NETS = ("ResNet-18", "GPT")  # larger ones than the contenders'
HEADS = {"speed": "samples/s", "evaluation": "evaluation, samples/s", "cpu": "CPU s of 1000 samples", "wall": "seconds",
         "first_step": "seconds to the first step", "rss": "peak RSS, MB", "private": "private, MB",
         "pss": "PSS, MB"}  # fmt: skip
Entry = tuple[str, int]
"""(name, ranks) of a contender"""
Runs = Sequence[Mapping[str, Any]]
"""[{"round", "name", "ranks", quantity: number, ...}, ...]"""


@dataclass(frozen=True)
class Settings:
    data: str
    samples: int = 15360
    test_samples: int = 2560
    epochs: int = 2
    batch: int = 128
    worlds: tuple[int, ...] = (2, 4, 8)  # of the start-up
    jobs: int = 8  # of the sweep
    floor_epochs: int = 6
    windows: int = 3600  # of text, in an epoch
    net_steps: int = 20  # of the larger nets, in an epoch


class Contender:
    """`commands` run one after the other, each over `ranks` processes. `parts`: which parts need it."""

    def __init__(self, name: str, ranks: int, parts: str, *commands: list[str]) -> None:
        self.name, self.ranks, self.parts, self.commands = name, ranks, set(parts.split()), commands


def torchrun(ranks: int) -> list[str]:
    return [*PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]


def launch(way: str, ranks: int) -> list[str]:
    """The command that starts `ranks` ranks of src/train.py: by torchrun, or by a launcher of conf/launch."""
    return [*torchrun(ranks), TRAIN] if way == "torchrun" else [*PYTHON, TRAIN, way, f"launch.nproc_per_node={ranks}"]


def script(name: str, settings: Settings, *own: str) -> list[str]:
    """A contender's file and its arguments."""
    same = [f"--data={settings.data}", f"--samples={settings.samples}", f"--test-samples={settings.test_samples}"]
    return [str(CONTENDERS / f"{name}.py"), *same, f"--epochs={settings.epochs}", f"--batch={settings.batch}", *own]


def overrides(settings: Settings, *own: str) -> list[str]:
    """What src/train.py is told: the contenders' data, batch size and batch norm, and to measure itself."""
    node = ["name=MNIST", "shape=[1,28,28]", "classes=10", "mean=[0.1307]", "std=[0.3081]"]
    data = ["dataset._target_=measured.FirstImages", *(f"dataset.{word}" for word in node)]
    data += [f"+dataset.samples={settings.samples}", f"+dataset.test_samples={settings.test_samples}"]
    same = [f"trainer.batch_size_per_rank={settings.batch}", f"trainer.epochs={settings.epochs}", "sync_bn=off"]
    return ["dataset=mnist", f"data_dir={settings.data}", *data, *same, *harness.MEASURED, "hydra.run.dir=run", *own]


def trainers(settings: Settings, ranks: int) -> list[Contender]:
    """All that train over `ranks` processes, with Lockstep beside its floors."""
    start = PYTHON if ranks == 1 else torchrun(ranks)
    accelerate = ACCELERATE if ranks == 1 else start
    lightning = script("lightning_mnist", settings, f"--devices={ranks}")  # it starts its own processes
    found = [
        Contender("tutorial", ranks, "train memory", start + script("tutorial", settings)),
        Contender(PRECISIONS["fp32"], ranks, "train memory", [*start, TRAIN, *overrides(settings)]),
        Contender("Lightning", ranks, "train", PYTHON + lightning),
        Contender("Accelerate", ranks, "train", accelerate + script("accelerate_mnist", settings)),
        Contender(PRECISIONS["bf16"], ranks, "train", [*start, TRAIN, *overrides(settings, "trainer.precision=bf16")]),
        Contender("references", ranks, "train", start + script("references", settings)),
    ]
    epochs = f"trainer.epochs={settings.floor_epochs}"
    for how, words in BESIDE.items():
        if ranks > 1 or "gloo" not in how:
            command = [*start, TRAIN, *overrides(settings, *words, *harness.BESIDE_FLOORS, epochs)]
            found.append(Contender(beside(how), ranks, "floor", command))
    for net, words in larger_nets(settings, ranks).items():
        command = [*start, TRAIN, *harness.MEASURED, *harness.BESIDE_FLOORS, *words, "sync_bn=off", "hydra.run.dir=run"]
        found.append(Contender(beside(net), ranks, "nets", command))
    return found


def larger_nets(settings: Settings, ranks: int) -> dict[str, list[str]]:
    """{one of NETS: its overrides}. A step of ResNet-18 takes a second, so it makes two epochs."""
    images, windows, steps = 64, WINDOWS_A_STEP, settings.net_steps
    resnet = [*harness.noise_images(steps * images * ranks, images), "model=resnet18", "trainer.epochs=2"]
    resnet.append(f"trainer.batch_size_per_rank={images}")
    gpt = ["experiment=shakespeare_char", f"data_dir={settings.data}", f"trainer.epochs={settings.floor_epochs}"]
    gpt += [f"dataset.samples={3 * steps * windows * ranks}", f"trainer.batch_size_per_rank={windows}"]
    gpt.append("trainer.max_grad_norm=null")
    return {"ResNet-18": resnet, "GPT": gpt}


def writers(settings: Settings) -> list[Contender]:
    """A small GPT on tinyshakespeare: nanoGPT's loop, and experiment=shakespeare_char with the same steps."""
    text = Settings(settings.data, samples=settings.windows, epochs=settings.epochs, batch=WINDOWS_A_STEP)
    same = [f"data_dir={text.data}", f"dataset.samples={text.samples}", f"trainer.epochs={text.epochs}"]
    command = [*PYTHON, TRAIN, "experiment=shakespeare_char", *same, *harness.MEASURED, "hydra.run.dir=run"]
    return [
        Contender("nanoGPT", 1, "text", PYTHON + script("nanogpt", text)),
        Contender("Lockstep, GPT", 1, "text", command),
        Contender("Lockstep, bf16, GPT", 1, "text", [*command, "trainer.precision=bf16"]),
    ]


def starters(settings: Settings) -> list[list[Contender]]:
    """The shortest scripts and Lockstep, by number of ranks and launcher."""
    short = overrides(Settings(settings.data, samples=1024, test_samples=512, epochs=1, batch=settings.batch))
    group = [Contender("minimal", 1, "startup", PYTHON + script("minimal", settings))]
    groups = [[*group, Contender("start by python", 1, "startup", [*PYTHON, TRAIN, *short])]]
    for ranks in settings.worlds:
        group = [Contender("minimal", ranks, "startup", torchrun(ranks) + script("minimal", settings))]
        for way in LAUNCHES:
            group.append(Contender(f"start by {way}", ranks, "startup", launch(way, ranks) + short))
        groups.append(group)
    return groups


def contenders(settings: Settings) -> list[list[Contender]]:
    """Groups of contenders; those of a group are compared with each other and run close together."""
    rates = [f"{0.01 * (number + 1):.2f}" for number in range(settings.jobs)]
    single = ["trainer.epochs=1", "sync_bn=off"]
    jobs = [[*launch("torchrun", 2), *single, f"optimizer.lr={rate}", f"hydra.run.dir=run/{rate}"] for rate in rates]
    sweep = ["-m", *single, f"optimizer.lr={','.join(rates)}", "hydra.sweep.dir=run"]
    many = Settings(settings.data, samples=8 * CROWD * settings.batch, epochs=1, batch=settings.batch)
    sweeps = [Contender(f"{settings.jobs} commands", 2, "sweep", *jobs)]
    for way in ("launch=torchrun", "launch=fork"):
        sweeps.append(Contender(f"sweep by {way}", 2, "sweep", launch(way, 2) + sweep))
    crowd = [Contender("tutorial", CROWD, "memory", torchrun(CROWD) + script("tutorial", many))]
    for way in ("torchrun", "launch=fork"):
        crowd.append(Contender(f"Lockstep by {way}", CROWD, "memory", launch(way, CROWD) + overrides(many)))
    answers = [Contender(words, 1, "help", [*PYTHON, TRAIN, *words.split()]) for words in ("--help", "--cfg job")]
    return [
        trainers(settings, 1),
        trainers(settings, 2),
        *starters(settings),
        sweeps,
        crowd,
        answers,
        writers(settings),
    ]


def run(one: Contender, folder: Path) -> dict[str, float]:
    """Run it in the empty folder `folder`. Returns {quantity: number}. Raises RuntimeError if a rank left no record."""
    folder.mkdir(parents=True)
    began, code = time.time(), 0
    for command in one.commands:
        code = harness.run_on_terminal(command, folder, CUDA_VISIBLE_DEVICES="") or code
    wall = time.time() - began
    records = harness.records(folder)
    if one.parts & {"sweep", "help"}:  # these do not measure themselves
        complete, found = not code, {}
    else:
        complete = len(records) == one.ranks
        found = figures(records, began) if complete else {}
    if not complete:
        what = f"{one.name} over {one.ranks} left {len(records)} records and exit code {code}"
        raise RuntimeError(f"{what}; see {folder / 'console.log'}")
    return {"wall": wall, "exit": code, **found}


def beside(how: str) -> str:
    """The name of Lockstep that runs beside its floors. how: of BESIDE or NETS."""
    return f"Lockstep beside its floor, {how}"


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
    pairs = [((name, 1), ("nanoGPT", 1)) for name in ("Lockstep, GPT", "Lockstep, bf16, GPT")]
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


def version(package: str) -> str:
    """Empty for a package that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def save(runs: Sequence[dict[str, Any]], settings: Settings, out: Path) -> None:
    """race.md and race.csv of the runs so far."""
    with (out / "race.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for run in runs for key in run)))
        writer.writeheader()
        writer.writerows(runs)
    versions = [f"{name} {version(name)}" for name in ("torch", "torchvision", "lightning", "accelerate")]
    (out / "race.md").write_text(report(runs, settings, ", ".join(versions)))


def race(asked: argparse.Namespace, settings: Settings, out: Path) -> bool:
    """All rounds. Returns whether every run left its figures."""
    runs: list[dict[str, Any]] = []
    complete = True
    groups = [[one for one in group if one.parts & set(asked.only)] for group in contenders(settings)]
    if not has_native_bf16():  # 8 times slower than fp32, so hours
        groups = [[one for one in group if "bf16" not in one.name] for group in groups]
    for turn in range(asked.rounds):
        for group in groups:
            if turn >= -(-asked.rounds // 2) and all(one.parts <= SLOW_PARTS for one in group):
                continue
            for one in harness.rotated(group, turn, asked.rounds):
                load = os.getloadavg()[0]
                folder = out / f"{turn}-{one.name.replace(' ', '_').replace(',', '')}-{one.ranks}"
                try:
                    found = run(one, folder)
                except RuntimeError as error:
                    complete = False
                    print(error, file=sys.stderr, flush=True)
                    continue
                runs.append({"round": turn, "name": one.name, "ranks": one.ranks, "load": load, **found})
                shown = [f"{key} {found[key]:.2f}" for key in ("speed", "first_step", "wall") if key in found]
                print(f"{turn + 1}/{asked.rounds}   {one.name} over {one.ranks}   {'   '.join(shown)}", flush=True)
                save(runs, settings, out)
    return complete


def main() -> None:
    arguments = harness.parser(__doc__, "bench", PARTS, rounds=4)
    default = os.environ.get("LOCKSTEP_DATA", ROOT / "data")
    arguments.add_argument("--data", default=default, type=Path, help="where MNIST/raw lies")
    asked = harness.parse(arguments)
    missing = [package for package in ("lightning", "accelerate") if "train" in asked.only and not version(package)]
    if missing:
        sys.exit(f"{missing[0]} is not installed; type {sys.executable} -m pip install -r requirements-bench.txt")
    from lockstep.data.vision import TorchvisionImages
    from lockstep.errors import ConfigError

    try:
        TorchvisionImages(name="MNIST", root=str(asked.data)).prepare()
    except ConfigError as error:
        sys.exit(str(error).partition("; type")[0] + "; type --data=<folder that holds MNIST>")
    small: dict[str, Any] = {"worlds": (2,), "jobs": 2, "floor_epochs": 1, "epochs": 1, "net_steps": 2}
    settings = Settings(str(asked.data.resolve()), **(small if asked.quick else {}))
    out = asked.out / time.strftime("%Y-%m-%d_%H-%M-%S")
    complete = race(asked, settings, out)
    print(f"\n{(out / 'race.md').read_text()}\ntables: {out / 'race.md'}\nruns:   {out / 'race.csv'}")
    sys.exit(not complete)


if __name__ == "__main__":
    main()
