"""One GPU: the tests that need one, and speeds beside bare loops.

--all is `make gpu`: the tests run first, and the tables go into bench/RESULTS.md. All of it takes at most `MINUTES`,
and each part its own time at most; a run that finds no time left has failed. Without a GPU a sentence says so.

Every run is `python src/train.py` with backend=auto. OUT/console.log is what the tests printed.
"""

import re
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import torch

# A step that logs waits for the device, so runs log once an epoch.
QUIET = [*harness.MEASURED, "logging.every=1000000", "snapshot.keep_last=1"]
MINUTES = 9  # of --all
ENDS = [float("inf")]  # time.time() when the last run of this part must have ended
Rows = Iterator[list[object]]
RESULTS = harness.ROOT / "bench" / "RESULTS.md"


def run(*overrides: str) -> dict[str, Any] | None:
    """The record of one command, see bench/measured.py; None if it failed."""
    left = min(600, ENDS[0] - time.time())
    try:
        return harness.recorded(harness.TRAIN, *QUIET, *overrides, limit=left)[0] if left > 0 else None
    except SystemExit as error:
        print(error, file=sys.stderr)
        return None


def speed(laps: list[dict[str, float]]) -> str:
    """Samples per second of the fastest epoch."""
    return f"{max(lap['samples'] / lap['seconds'] for lap in laps):,.0f}"


def tests(out: Path) -> Rows:
    """How the tests that need a GPU ended. One that wants two GPUs is skipped where there is one."""
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "--tb=short", "-m", "gpu", "-n", "8",
               "tests/runs/test_gpu.py"]  # fmt: skip
    code = harness.run_on_terminal(command, out, ENDS[0] - time.time(), cwd=harness.ROOT)
    last = (out / "console.log").read_text(errors="replace").strip().rpartition("\n")[2].strip("= ")
    yield [f"{'failed: ' * bool(code)}{'no time left' if code == 124 else last}"]


def bare_loops(quick: bool) -> Rows:
    """Samples/s in turns with a loop of nothing but forward, backward and update, in one process."""
    samples, batch, windows, few = (8, 4, 4, 2) if quick else (40_960, 512, 5120, 64)
    # A text that is here; a step takes as long with any.
    gpt = ["dataset=text", f"dataset.path={RESULTS}", "dataset.tokenizer=bytes", "optimizer=adamw"]
    gpt += [f"dataset.samples={windows}", f"trainer.batch_size={few}"]
    gpt += [] if quick else ["dataset.block=256", "model.layers=6", "model.heads=6", "model.width=384"]
    noise = [*harness.images("noise", samples, min(samples, 512)), f"trainer.batch_size={batch}"]
    data = {"convnet": noise, "resnet18": noise, "gpt": gpt}
    epochs = ["trainer.epochs=3", "evaluation.every=3", "snapshot.every=3epochs"]
    cases = [(model, precision) for model in data for precision in (("fp32",) if quick else ("fp32", "bf16"))]
    cases += [("convnet", "bf16", "step=cuda_graph")] if torch.cuda.is_available() else []
    for model, precision, *step in cases:
        words = [*data[model], f"model={model}", f"trainer.precision={precision}", *step]
        record, name = run(*words, *harness.BESIDE_FLOORS, *epochs), ", ".join([model, *step])
        if record:
            ours, bare = record["training"][1:], record["bare loop"][1:]
            kept = harness.ratios(*([lap["seconds"] for lap in laps] for laps in (bare, ours)))
        yield [name, precision, speed(ours), speed(bare), kept] if record else [name, precision, "failed", "", ""]


def cifar10_speed(quick: bool) -> Rows:
    """The time of the preset's eight epochs and one evaluation, on noise, so without an accuracy."""
    samples = 64 if quick else 50_000
    own = [*harness.images("noise", samples, min(samples, 10_000)), "snapshot.every=8epochs", "evaluation.every=8"]
    own += ["trainer.precision=fp32", "model.widths=[8,16,16]"] if quick else []
    for mode in ("false",) if quick else ("false", "true", "reduce-overhead"):  # the last one records CUDA graphs
        record = run("experiment=cifar10_speed", *own, f"trainer.compile={mode}")
        took = f"{record['evaluated'] - record['first_step']:.2f} s" if record else ""
        yield [mode, speed(record["training"]), took] if record else [mode, "failed", ""]


PARTS: dict[str, tuple[float, list[str], Any]] = {  # minutes, head, what gives the rows
    "bare loops": (2.5, ["in turns with a bare loop", "precision", "samples/s", "the bare loop's", "fraction kept"],
                   bare_loops),
    "cifar10_speed": (2, ["experiment=cifar10_speed, trainer.compile=", "samples/s", "from the first step to the end"],
                      cifar10_speed),
}  # fmt: skip


def main() -> None:
    words = f"tests, too, in {MINUTES} minutes; fills RESULTS.md"
    asked = harness.parse(__doc__, "gpu", all={"action": "store_true", "help": words})
    if asked.all and not torch.cuda.is_available():
        print("There is no GPU here, so nothing is tested or measured. To see that the measurements run on a CPU, type")
        print("python bench/gpu.py --quick")
        return
    end = time.time() + 60 * MINUTES if asked.all else float("inf")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else harness.processor()
    about = f"`python bench/gpu.py{' --quick' * asked.quick}`, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}."
    found = {"": f"## One device: {name}\n\n{about}\n"}
    parts = {"tests": (2.5, ["`pytest -m gpu tests`"], lambda _: tests(asked.out))} if asked.all else {}
    for part, (minutes, head, measure) in (parts | PARTS).items():
        ENDS[0] = min(end, time.time() + 60 * minutes) if asked.all else end
        rows: list[list[object]] = []
        try:
            for row in measure(asked.quick):
                rows.append(row)
                found[part] = harness.table(head, rows)
                keep(asked, found)
        except Exception:
            traceback.print_exc()
            found[part] = found.get(part, "") + f"| failed: {part} |\n"
            keep(asked, found)
        print(found[part], flush=True)
    print(f"tables: {asked.out / 'gpu.md'}")
    if any("| failed" in text for text in found.values()):
        sys.exit("a run failed, or had no time left: see above")


def keep(asked: Any, found: dict[str, str]) -> None:
    """Write what has been measured: a later failure, or the end of a loan of the machine, loses nothing of it."""
    section = "\n".join(found.values())
    (asked.out / "gpu.md").write_text(section)
    if asked.all:  # in the place of the section on one device
        before, _, rest = RESULTS.read_text().partition("## One device")
        following = re.search("^## ", rest, re.MULTILINE)
        RESULTS.write_text(before + section + ("\n" + rest[following.start() :] if following else ""))


if __name__ == "__main__":
    main()
