"""One GPU: the tests that need one, speeds beside bare loops, and where the host waits.

python bench/gpu.py [--quick] [--all] [--out=outputs/gpu]

--all is `make gpu`: the tests run first, and the tables go into bench/RESULTS.md. All of it takes at most `MINUTES`,
and each part its own time at most: what tells most in a minute comes first, and a part that finds no time left is
named. Rows are written as soon as they are measured. Without a GPU a sentence says so, and nothing is done.

Every run is the command `python src/train.py` with backend=auto: nccl and one rank where there is a GPU, gloo where
there is none. The CIFAR-10-shaped images are noise. OUT/gpu.md is a section for bench/RESULTS.md, and OUT/console.log
is what the tests printed.
"""

import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from harness import TRAIN, table

COMPILE = ("false", "true", "reduce-overhead")  # trainer.compile; the last one records CUDA graphs
# A step that logs waits for the device, so runs log once an epoch.
QUIET = [*harness.WHOLE, harness.RECORDER, "logging.every=1000000", "snapshot.keep_last=1"]
MINUTES = 9  # of --all
ENDS = [float("inf")]  # time.time() when the last run of this part must have ended


def run(*overrides: str, measured: str = harness.MEASURED_STEPS) -> dict[str, Any] | None:
    """The record of one command, see bench/measured.py, with "began"; None if it failed."""
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.time()
        command = [sys.executable, TRAIN, f"hydra.run.dir={folder}/run", *QUIET, measured, *overrides]
        left = min(600, ENDS[0] - began)
        code = harness.run_on_terminal(command, folder, left) if left > 0 else 124
        for record in harness.records(folder) if code == 0 else []:
            return {"began": began, **record}
        console = folder / "console.log"
        print(console.read_text()[-3000:] if console.exists() else "no time left for a run", file=sys.stderr)
        return None


def speed(record: dict[str, Any]) -> float:
    """Samples per second of the fastest epoch."""
    return max(lap["samples"] / lap["seconds"] for lap in record["training"])


def growing(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """The table after each row."""
    found: list[Sequence[object]] = []
    for row in rows:
        found.append(row)
        yield table(head, found)


def tests(out: Path) -> Iterator[str]:
    """How the tests that need a GPU ended. One that wants two GPUs is skipped where there is one."""
    files = [f"tests/runs/{name}.py" for name in ("test_gpu", "test_host_never_waits")]
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "--tb=short", "-m", "gpu", "-n", "8", *files]
    code = harness.run_on_terminal(command, out, ENDS[0] - time.time(), cwd=harness.ROOT)
    last = (out / "console.log").read_text(errors="replace").strip().rpartition("\n")[2].strip("= ")
    words = "no time left" if code == 124 else last
    yield f"`pytest -m gpu tests`: {words}.\n" if code == 0 else f"| failed: `pytest -m gpu tests`: {words} |\n"


def host_syncs(compiles: Sequence[str]) -> Iterator[str]:
    """Where the host waits for the device in a training step. There should be no such place."""

    def row(mode: str) -> list[object]:
        record = run("trainer.precision=bf16", "trainer.epochs=1", f"trainer.compile={mode}",
                     "callbacks=[{_target_: measured.SyncCounts}]")  # fmt: skip
        if not record:
            return [mode, "failed", ""]
        places = [f"{place} ({times})" for place, times in sorted(record["places"].items())]
        return [mode, record["steps"], ", ".join(places) or "nowhere"]

    return growing(["trainer.compile=", "steps watched", "host syncs in them"], map(row, compiles))


def bare_loops(quick: bool) -> Iterator[str]:
    """Samples/s in turns with a loop of nothing but forward, backward and update, in one process."""
    samples, batch, windows, few = (8, 4, 4, 2) if quick else (40_960, 512, 5120, 64)
    text = harness.ROOT / "bench" / "RESULTS.md"  # a text that is here; a step takes as long with any
    gpt = ["dataset=text", f"dataset.path={text}", "dataset.tokenizer=bytes", "optimizer=adamw"]
    gpt += [f"dataset.samples={windows}", f"trainer.batch_size={few}"]
    gpt += [] if quick else ["dataset.block=256", "model.layers=6", "model.heads=6", "model.width=384"]
    noise = [*harness.noise_images(samples, min(samples, 512)), f"trainer.batch_size={batch}"]
    data = {"convnet": noise, "resnet18": noise, "gpt": gpt}

    def row(model: str, precision: str, step: str = "default") -> list[object]:
        record = run(*data[model], f"step={step}", f"model={model}", f"trainer.precision={precision}",
                     *harness.BESIDE_FLOORS, "trainer.epochs=3", "evaluation.every=3",
                     "snapshot.every=3epochs")  # fmt: skip
        name = model if step == "default" else f"{model}, step={step}"
        if not record:
            return [name, precision, "failed", "", ""]
        laps = list(zip(record["training"], record["bare loop"], strict=True))[1:]
        kept = [floor["seconds"] / ours["seconds"] for ours, floor in laps]
        bare = max(floor["samples"] / floor["seconds"] for _, floor in laps)
        return [name, precision, f"{speed(record):,.0f}", f"{bare:,.0f}", harness.spread(kept)]

    cases = [(model, precision) for model in data for precision in (("fp32",) if quick else ("fp32", "bf16"))]
    cases += [("convnet", "bf16", "cuda_graph")] if torch.cuda.is_available() else []
    rows = (row(*case) for case in cases)
    return growing(["in turns with a bare loop", "precision", "samples/s", "the bare loop's", "fraction kept"], rows)


def cifar10_speed(quick: bool, compiles: Sequence[str]) -> Iterator[str]:
    """The time of the preset's eight epochs and one evaluation, on noise, so without an accuracy."""
    samples = 64 if quick else 50_000
    data = harness.noise_images(samples, min(samples, 10_000))
    if quick:
        data = [*data, "trainer.precision=fp32", "model.widths=[8,16,16]"]

    def row(mode: str) -> list[object]:
        record = run("experiment=cifar10_speed", *data, f"trainer.compile={mode}", "snapshot.every=8epochs")
        if not record:
            return [mode, "failed", ""]
        return [mode, f"{speed(record):,.0f}", f"{record['evaluations'][-1][0] - record['first_step']:.2f} s"]

    head = ["experiment=cifar10_speed, trainer.compile=", "samples/s", "from the first step to the end"]
    return growing(head, map(row, compiles))


def put_into_results(section: str) -> None:
    """In the place of the section on one device."""
    path = harness.ROOT / "bench" / "RESULTS.md"
    before, _, rest = path.read_text().partition("## One device")
    following = re.search("^## ", rest, re.MULTILINE)
    path.write_text(before + section + ("\n" + rest[following.start() :] if following else ""))


def main() -> None:
    arguments = harness.parser(__doc__, "gpu")
    arguments.add_argument("--all", action="store_true", help=f"tests, too, in {MINUTES} minutes; fills RESULTS.md")
    asked = harness.parse(arguments)
    if asked.all and not torch.cuda.is_available():
        print("There is no GPU here, so nothing is tested or measured. To see that the measurements run on a CPU, type")
        print("python bench/gpu.py --quick")
        return
    end = time.time() + 60 * MINUTES if asked.all else float("inf")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else harness.processor()
    about = f"`python bench/gpu.py{' --quick' * asked.quick}`, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}."
    found = {"": f"## One device: {name}\n\n{about}\n"}
    plain, compiled = COMPILE[:1], () if asked.quick else COMPILE[1:]
    parts: dict[str, tuple[float, Any]] = {  # minutes, and what is called
        "tests": (2.5, lambda: tests(asked.out)),
        "host waits": (0.5, lambda: host_syncs(plain)),
        "bare loops": (2.5, lambda: bare_loops(asked.quick)),
        "cifar10_speed": (0.5, lambda: cifar10_speed(asked.quick, plain)),
        "cifar10_speed, compiled": (1.5, lambda: cifar10_speed(asked.quick, compiled)),
        "host waits, compiled": (1, lambda: host_syncs(compiled)),
    }
    if not asked.all:
        del parts["tests"]
    for part, (minutes, measure) in parts.items():
        ENDS[0] = min(end, time.time() + 60 * minutes) if asked.all else end
        if ENDS[0] <= time.time():
            found[part] = f"| no time left for {part} |\n"
        else:
            try:
                for found[part] in measure():
                    keep(asked, found)
            except Exception:
                traceback.print_exc()
                found[part] = found.get(part, "") + f"| failed: {part} |\n"
        keep(asked, found)
        print(found.get(part, ""), flush=True)
    print(f"tables: {asked.out / 'gpu.md'}")
    if any("| failed" in text for text in found.values()):
        sys.exit("a run failed, or had no time left: see above")


def keep(asked: Any, found: dict[str, str]) -> None:
    """Write what has been measured: a later failure, or the end of a loan of the machine, loses nothing of it."""
    section = "\n".join(found.values())
    (asked.out / "gpu.md").write_text(section)
    if asked.all:
        put_into_results(section)


if __name__ == "__main__":
    main()
