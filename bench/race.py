"""`make bench`: Lockstep against what one would run otherwise, in turns: the same model, data, batch and samples.

Every contender (bench/contenders/) is a command started as its users start it. Lockstep is src/train.py with its
defaults: Hydra, TensorBoard, progress bar, metrics and snapshots are on. Only sync_bn=off is passed, because no
contender synchronises batch norm. Tables, the figures of every run and its console go to outputs/bench/<time>/.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

import harness
from harness import BESIDE_FLOORS, CONTENDERS, MEASURED, TRAIN, spread

from lockstep.distributed.host import has_native_bf16

ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1",
              "--mixed_precision=no", "--dynamo_backend=no"]  # fmt: skip
PARTS = ("train", "floor", "nets", "text", "startup", "sweep", "memory", "help")
SLOW_PARTS = {"nets", "startup", "sweep", "memory"}  # run in half of the rounds
LAUNCHES = ("torchrun", "launch=torchrun", "launch=spawn", "launch=fork")
FLOORS = {"bare loop": 1, "bare DDP": 2, "no synchronisation": 2}  # {floor: processes}
CROWD = 8  # ranks whose memory is measured
MEMORY = "Memory of the rank that has most", ("rss", "private", "pss")
HEADS = {"speed": "samples/s", "evaluation": "evaluation, samples/s", "cpu": "CPU s of 1000 samples", "wall": "seconds",
         "first_step": "seconds to the first step", "rss": "peak RSS, MB", "private": "private, MB",
         "pss": "PSS, MB"}  # fmt: skip


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


class Group(NamedTuple):
    """Contenders of one number of ranks that run close together, and what its table has of them.

    commands: {name: commands, one after the other}. against: the names that all are compared with. Where quantities is
    the wall time alone, the contenders do not measure themselves.
    """

    part: str
    title: str
    quantities: tuple[str, ...]
    ranks: int
    commands: dict[str, list[list[str]]]
    against: tuple[str, ...] = ()


# Each with {contender: [{quantity: number} of each round]}; {} is a run that failed
Results = Sequence[tuple[Group, Mapping[str, Sequence[Mapping[str, float]]]]]


def torchrun(ranks: int) -> list[str]:
    """How a script is started. One process needs no torchrun."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *(several if ranks > 1 else ())]


def launch(way: str, ranks: int, *words: str) -> list[str]:
    """The command that starts `ranks` ranks of src/train.py: by torchrun, or by a launcher of conf/launch."""
    own = [sys.executable, TRAIN, way, f"launch.nproc_per_node={ranks}"]
    return [*(own if "=" in way else [*torchrun(ranks), TRAIN]), *words]


def script(name: str, settings: Settings, *own: str) -> list[str]:
    """A contender's file and its arguments."""
    same = [f"--data={settings.data}", f"--samples={settings.samples}", f"--test-samples={settings.test_samples}"]
    return [str(CONTENDERS / f"{name}.py"), *same, f"--epochs={settings.epochs}", f"--batch={settings.batch}", *own]


def overrides(settings: Settings) -> list[str]:
    """What src/train.py is told: the contenders' data, batch size and batch norm, and to measure itself."""
    data = harness.images("mnist", settings.samples, settings.test_samples)
    same = [f"trainer.batch_size_per_rank={settings.batch}", f"trainer.epochs={settings.epochs}", "sync_bn=off"]
    return [*data, f"data_dir={settings.data}", *same, *MEASURED]


def groups(settings: Settings) -> Iterator[Group]:
    for ranks in (1, 2):
        start, lightning = torchrun(ranks), script("lightning_mnist", settings, f"--devices={ranks}")
        own = launch("torchrun", ranks, *overrides(settings))
        commands = {
            "Lockstep": [own],
            "Lockstep, bf16": [[*own, "trainer.precision=bf16"]],
            "tutorial": [start + script("tutorial", settings)],
            "Lightning": [[sys.executable, *lightning]],  # it starts its own processes
            "Accelerate": [(ACCELERATE if ranks == 1 else start) + script("accelerate_mnist", settings)],
            "references": [start + script("references", settings)],
        }
        title, others = f"Training, processes: {ranks}", ("tutorial", "Lightning", "Accelerate", "references")
        yield Group("train", title, ("speed", "evaluation", "cpu", "wall"), ranks, commands, others)
        commands = {name: commands[name] for name in ("Lockstep", "tutorial")}
        yield Group("memory", *MEMORY, ranks, commands, ("tutorial",))

        own = overrides(replace(settings, epochs=settings.floor_epochs))
        ways = {precision: [*own, f"trainer.precision={precision}"] for precision in ("fp32", "bf16")}
        if ranks > 1:  # gloo instead of what gradient_sync=auto takes
            ways |= {f"{how}, gloo": [*words, "gradient_sync=all_reduce"] for how, words in ways.items()}
        samples = settings.net_steps * ranks  # of an epoch, for each one in a rank's batch
        resnet = [*harness.images("noise", 64 * samples, 64), "model=resnet18", "trainer.batch_size_per_rank=64"]
        gpt = ["experiment=shakespeare_char", f"data_dir={settings.data}", f"dataset.samples={36 * samples}"]
        epochs = f"trainer.epochs={settings.floor_epochs}"
        gpt += ["trainer.batch_size_per_rank=12", epochs, "trainer.max_grad_norm=null"]
        # A step of ResNet-18 takes a second, so it makes two epochs.
        nets = {"ResNet-18": [*MEASURED, *resnet, "trainer.epochs=2"], "GPT": [*MEASURED, *gpt]}
        title = "In turns with floors: the fraction of their speed kept"
        quantities, same = ("speed", *(f"of {floor}" for floor in FLOORS)), [*BESIDE_FLOORS, "sync_bn=off"]
        for part, whole in {"floor": ways, "nets": nets}.items():
            commands = {f"beside floors, {how}": [launch("torchrun", ranks, *own, *same)] for how, own in whole.items()}
            yield Group(part, title, quantities, ranks, commands)

    # 12 windows of 64 characters a step on both sides, so that a ratio of samples/s is one of tokens/s
    same = [f"data_dir={settings.data}", f"dataset.samples={settings.windows}", f"trainer.epochs={settings.epochs}"]
    own = [sys.executable, TRAIN, "experiment=shakespeare_char", *same, *MEASURED]
    nanogpt = script("nanogpt", replace(settings, samples=settings.windows, batch=12))
    commands = {"Lockstep, GPT": [own], "Lockstep, bf16, GPT": [[*own, "trainer.precision=bf16"]]}
    commands["nanoGPT"] = [[sys.executable, *nanogpt]]
    yield Group("text", "A GPT on 64 characters", ("speed", "cpu", "first_step", "rss"), 1, commands, ("nanoGPT",))

    own = overrides(replace(settings, samples=1024, test_samples=512, epochs=1))
    for ranks in (1, *settings.worlds):
        ways = LAUNCHES if ranks > 1 else ("python",)
        commands = {f"start by {way}": [launch(way, ranks, *own)] for way in ways}
        commands["minimal"] = [torchrun(ranks) + script("minimal", settings)]
        yield Group("startup", "Until the first step has ended", ("first_step",), ranks, commands, ("minimal",))

    rates = [f"{0.01 * (number + 1):.2f}" for number in range(settings.jobs)]
    own, name = ["trainer.epochs=1", "sync_bn=off"], f"{settings.jobs} commands"
    jobs = [launch("torchrun", 2, *own, f"optimizer.lr={rate}", f"hydra.run.dir=run/{rate}") for rate in rates]
    own += ["-m", f"optimizer.lr={','.join(rates)}", "hydra.sweep.dir=run"]
    commands = {f"sweep by {way}": [launch(way, 2, *own)] for way in ("launch=torchrun", "launch=fork")}
    yield Group("sweep", "A sweep of short jobs", ("wall",), 2, commands | {name: jobs}, (name,))

    many = replace(settings, samples=8 * CROWD * settings.batch, test_samples=2560, epochs=1)
    commands = {f"Lockstep by {way}": [launch(way, CROWD, *overrides(many))] for way in ("torchrun", "launch=fork")}
    commands["tutorial"] = [torchrun(CROWD) + script("tutorial", many)]
    yield Group("memory", *MEMORY, CROWD, commands, ("tutorial",))

    commands = {words: [[sys.executable, TRAIN, *words.split()]] for words in ("--help", "--cfg job")}
    yield Group("help", "--help and --cfg", ("wall",), 1, commands)


def run(group: Group, name: str, folder: Path) -> dict[str, float]:
    """One contender in the empty folder `folder`: {quantity: number}; {}, and a sentence, if it left no figures."""
    folder.mkdir(parents=True)
    load, began, code = os.getloadavg()[0], time.time(), 0
    for command in group.commands[name]:
        code = harness.run_on_terminal(command, folder, CUDA_VISIBLE_DEVICES="") or code
    found = {"wall": time.time() - began, "load": load, "exit": code}
    records, measures_itself = harness.records(folder), group.quantities != ("wall",)
    if len(records) != group.ranks if measures_itself else code:
        what = f"{name} over {group.ranks} left {len(records)} records and exit code {code}"
        print(f"{what}; see {folder / 'console.log'}", file=sys.stderr, flush=True)
        return {}
    found |= figures(records, began) if measures_itself else {}
    shown = [f"{key} {found[key]:.2f}" for key in ("speed", "first_step", "wall") if key in found]
    print(f"{name} over {group.ranks}   {'   '.join(shown)}", flush=True)
    return found


def figures(records: Sequence[dict[str, Any]], began: float) -> dict[str, float]:
    """{quantity: number} from the ranks' records: a time is the slowest rank's, CPU time is the sum over ranks.

    speed, evaluation: samples/s. cpu: CPU seconds for 1000 training samples. first_step: seconds from the command.
    rss, private, pss: MB of the rank that has most. of <floor>: of its speed, the median of all epochs.
    """

    def seconds(what: str) -> list[float]:
        laps = zip(*(record[what] for record in records), strict=True)
        return [max(lap["seconds"] for lap in ranks) for ranks in laps]

    first, training = records[0], seconds("training")
    found = {"first_step": max(record["first_step"] for record in records) - began}
    if training:
        samples = sum(lap["samples"] for lap in first["training"])
        found["speed"] = samples / sum(training)
        found["cpu"] = 1000 * sum(lap["cpu"] for record in records for lap in record["training"]) / samples
    if laps := first["evaluation"]:  # rank 0 has the metrics only when all ranks have evaluated
        found["evaluation"] = sum(lap["samples"] for lap in laps) / sum(lap["seconds"] for lap in laps)
    for name in FLOORS.keys() & first.keys():
        found[f"of {name}"] = statistics.median(map(truediv, seconds(name), training))
    found |= {key: max(record[key] for record in records) for key in ("rss", "private", "pss") if key in first}
    return found | ({} if first["accuracy"] is None else {"accuracy": first["accuracy"]})


def rows_of(group: Group, found: Mapping[str, Any]) -> Iterator[list[object]]:
    """What each contender measured, and its ratios to those it is compared with, in shared rounds."""
    for name, mine in found.items():
        for other in [name] if name in group.against else group.against or [""]:
            row: list[object] = [name, group.ranks, *filter(None, [other])]
            for quantity in group.quantities:
                row.append(spread([one[quantity] for one in mine if quantity in one]))
                if other:
                    pairs = zip(mine, found.get(other, ()), strict=False)
                    both = [(one[quantity], their[quantity]) for one, their in pairs if quantity in one.keys() & their]
                    row.append(harness.ratios(*zip(*both, strict=True)) if both else "-")
            if any(quantity in one for one in mine for quantity in group.quantities):
                yield row


def report(results: Results, settings: Settings) -> str:
    """The whole page, in Markdown."""
    packages = filter(find_spec, ("torch", "torchvision", "lightning", "accelerate"))
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    loads = [one["load"] for _, found in results for ones in found.values() for one in ones if one]
    page = (
        "# Lockstep against the others\n\n"
        f"{settings.samples} training and {settings.test_samples} test samples of MNIST, batch {settings.batch} "
        f"a rank, {settings.epochs} epochs; median (smallest-largest) of paired runs. A ratio is the first over the "
        "other. Lockstep runs with sync_bn=off, because no contender synchronises batch norm."
        f"\n\n{harness.processor()}, load before the runs {spread(loads)}; {versions}.\n"
    )
    if not has_native_bf16():
        page += "\nNot run: bf16, which this CPU does not compute natively.\n"
    tables: dict[tuple[str, ...], list[list[object]]] = {}
    for group, found in results:
        head, ratio = ["", "ranks", *["against"] * bool(group.against)], ["ratio"] * bool(group.against)
        for quantity in group.quantities:
            head += [HEADS.get(quantity, quantity), *ratio]
        tables.setdefault((group.title, *head), []).extend(rows_of(group, found))
    shown = [f"\n## {title}\n\n{harness.table(head, rows)}" for (title, *head), rows in tables.items() if rows]
    return page + "".join(shown)


def main() -> None:
    place = os.environ.get("LOCKSTEP_DATA", harness.ROOT / "data")
    data = {"default": place, "type": Path, "help": "where MNIST/raw lies"}
    asked = harness.parse(__doc__, "bench", PARTS, rounds=4, data=data)
    missing = [package for package in ("lightning", "accelerate") if "train" in asked.only and not find_spec(package)]
    if missing:
        sys.exit(f"{missing[0]} is not installed; type {sys.executable} -m pip install -r requirements-bench.txt")
    from lockstep.data.vision import TorchvisionImages

    TorchvisionImages(name="MNIST", root=str(asked.data)).prepare()  # else contenders would download it
    small: dict[str, Any] = {"worlds": (2,), "jobs": 2, "floor_epochs": 1, "epochs": 1, "net_steps": 2}
    settings = Settings(str(asked.data.resolve()), **(small if asked.quick else {}))
    out, results = asked.out / time.strftime("%Y-%m-%d_%H-%M-%S"), list[Any]()

    def measure(group: Group, name: str, found: dict[str, list[Any]]) -> None:
        folder = f"{group.part}-{name.replace(' ', '_').replace(',', '')}-{group.ranks}-{len(found[name])}"
        found[name].append(run(group, name, out / folder))
        (out / "race.md").write_text(report(results, settings))
        runs = [{"part": group.part, "ranks": group.ranks, "runs": found} for group, found in results]
        (out / "race.json").write_text(json.dumps(runs))

    for group in (one for one in groups(settings) if one.part in asked.only):
        # On a CPU without bf16 it would take 8 times as long as fp32, so hours.
        found: Any = {name: [] for name in group.commands if has_native_bf16() or "bf16" not in name}
        results.append((group, found))
        rounds = -(-asked.rounds // 2) if group.part in SLOW_PARTS else asked.rounds
        harness.interleave({name: partial(measure, group, name, found) for name in found}, rounds)
    print(f"\n{(out / 'race.md').read_text()}\ntables: {out / 'race.md'}\nruns:   {out / 'race.json'}")
    sys.exit(not all(one for _, found in results for ones in found.values() for one in ones))


if __name__ == "__main__":
    main()
