"""One GPU: the tests that need one, speeds beside bare loops, and how much of the card's own matmul rate that is.

python bench/gpu.py [--quick] [--all] [--out=outputs/gpu]

--all is `make gpu`: the tests run first, and the tables go into bench/RESULTS.md. All of it takes at most `MINUTES`: a
part that finds no time left is named. Without a GPU a sentence says so, and nothing is done.

Every run is the command `python src/train.py` with backend=auto: nccl and one rank where there is a GPU, gloo where
there is none. MNIST is read from LOCKSTEP_DATA; without it the digits inside scikit-learn are used. The CIFAR-10-shaped
images are noise. OUT/gpu.md is a section for bench/RESULTS.md.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from harness import TRAIN, table

COMPILE = ("false", "true", "reduce-overhead")  # trainer.compile; the last one records CUDA graphs
MATMUL_SECONDS = 0.3  # that a matmul rate is measured for
# A step that logs waits for the device, so runs log once an epoch.
QUIET = [*harness.MEASURED, "logging.every=1000000", "snapshot.keep_last=1"]
MINUTES = 9  # of --all
TESTS_MINUTES = 3
ENDS = [float("inf")]  # time.time() when the last run must have ended


def run(*overrides: str) -> dict[str, Any] | None:
    """The record of one command, see bench/measured.py, with "began"; None if it failed."""
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.time()
        command = [sys.executable, TRAIN, f"hydra.run.dir={folder}/run", *QUIET, *overrides]
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


def matmul_rates(device: torch.device, sizes: Sequence[int]) -> dict[str, float]:
    """{type: the best rate, in FLOP/s, of products of square matrices}."""
    types = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
    if device.type == "cpu":
        types.pop("tf32")
    rates: dict[str, float] = {}
    for name, dtype in types.items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        rates[name] = max(2 * size**3 / matmul_seconds(device, dtype, size) for size in sizes)
    return rates


def matmul_seconds(device: torch.device, dtype: torch.dtype, size: int) -> float:
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    product, best, until = one @ other, float("inf"), time.perf_counter() + MATMUL_SECONDS
    while time.perf_counter() < until:
        synchronize()
        began = time.perf_counter()
        for _ in range(10):
            torch.mm(one, other, out=product)
        synchronize()
        best = min(best, (time.perf_counter() - began) / 10)
    return best


def to_accuracy(quick: bool, compiles: Sequence[str]) -> str:
    """A table: MNIST to 99 % accuracy, from the command and from the first step."""
    if "LOCKSTEP_DATA" in os.environ and not quick:
        data, goal, recipe = "mnist", 0.99, ["trainer.batch_size=256", "optimizer.lr=0.1", "trainer.epochs=2"]
    else:
        data, goal, recipe = "digits", 0.95, ["trainer.epochs=3"]
    rows = []
    for mode in compiles:
        record = run(f"dataset={data}", "optimizer.nesterov=true", "trainer.precision=bf16", f"trainer.compile={mode}",
                     *recipe)  # fmt: skip
        cells = ["failed", "", "", ""]
        if record:
            reached = [moment for moment, accuracy in record["evaluations"] if accuracy >= goal]
            times = [f"{reached[0] - record[start]:.2f} s" if reached else "-" for start in ("began", "first_step")]
            cells = [f"{speed(record):,.0f}", f"{record['evaluations'][-1][1]:.4f}", *times]
        rows.append([mode, *cells])
    head = [f"{data}, convnet, bf16, trainer.compile=", "samples/s", "test accuracy", f"{goal:.0%} from the command"]
    return table([*head, f"{goal:.0%} from the first step"], rows)


def throughput(quick: bool, compiles: Sequence[str], rates: dict[str, float]) -> str:
    """A table: samples/s of a ResNet-18 and what share of the matmul rate that is, by batch size and precision."""
    samples, batches = (32, (16,)) if quick else (50_000, (128, 512, 2048))
    data = [*harness.noise_images(samples, min(samples, 2048)), "model=resnet18"]
    flops = harness.training_flops("dataset=cifar10", "model=resnet18")
    precisions = ("fp32",) if quick else ("fp32", "bf16")  # some CPUs make two samples a second in bf16
    cases = [(precision, batch, "false") for precision in precisions for batch in batches]
    cases += [("bf16", batches[-1], mode) for mode in compiles[1:]]
    rows = []
    for precision, batch, mode in cases:
        record = run(*data, f"trainer.precision={precision}", f"trainer.batch_size={batch}", f"trainer.compile={mode}",
                     "trainer.epochs=3", "evaluation.every=3", "snapshot.every=3epochs")  # fmt: skip
        cells = ["failed", "", "", ""]
        if record:
            kind = "tf32" if precision == "fp32" and "tf32" in rates else precision  # what cuDNN convolves float32 in
            rate = speed(record)
            memory = f"{record['GiB']:.1f} GiB" if record["GiB"] else ""
            share = f"{rate * flops / rates[kind]:.0%} of {kind}"
            cells = [f"{rate:,.0f}", f"{rate * flops / 1e12:.4g}", share, memory]
        rows.append([precision, batch, mode, *cells])
    head = f"ResNet-18 on 3x32x32, {flops / 1e9:.2f} GFLOP a sample"
    return table([head, "batch", "trainer.compile=", "samples/s", "TFLOP/s", "of its matmul rate", "peak memory"], rows)


def cifar10_speed(quick: bool, compiles: Sequence[str]) -> str:
    """A table: the time of the preset's eight epochs and one evaluation, on noise, so without an accuracy."""
    samples = 64 if quick else 50_000
    data = harness.noise_images(samples, min(samples, 10_000))
    if quick:
        data = [*data, "trainer.precision=fp32", "model.widths=[8,16,16]"]
    rows = []
    for mode in compiles:
        record = run("experiment=cifar10_speed", *data, f"trainer.compile={mode}", "snapshot.every=8epochs")
        cells = ["failed", ""]
        if record:
            cells = [f"{speed(record):,.0f}", f"{record['evaluations'][-1][0] - record['first_step']:.2f} s"]
        rows.append([mode, *cells])
    return table(["experiment=cifar10_speed, trainer.compile=", "samples/s", "from the first step to the end"], rows)


def bare_loops(quick: bool) -> str:
    """A table: samples/s in turns with a loop of nothing but forward, backward and update, in one process."""
    samples, batch, windows, few = (8, 4, 4, 2) if quick else (40_960, 512, 5120, 64)
    text = harness.ROOT / "bench" / "RESULTS.md"  # a text that is here; a step takes as long with any
    gpt = ["dataset=text", f"dataset.path={text}", "dataset.symbols=bytes", "dataset.classes=256", "optimizer=adamw"]
    gpt += [f"dataset.samples={windows}", f"trainer.batch_size={few}"]
    gpt += [] if quick else ["dataset.block=256", "model.layers=6", "model.heads=6", "model.width=384"]
    noise = [*harness.noise_images(samples, min(samples, 512)), f"trainer.batch_size={batch}"]
    rows = []
    for model, data in {"convnet": noise, "resnet18": noise, "gpt": gpt}.items():
        for precision in ("fp32",) if quick else ("fp32", "bf16"):
            record = run(*data, f"model={model}", f"trainer.precision={precision}", "trainer.epochs=3",
                         *harness.BESIDE_FLOORS, "evaluation.every=3", "snapshot.every=3epochs")  # fmt: skip
            cells = ["failed", "", ""]
            if record:
                laps = list(zip(record["training"], record["bare loop"], strict=True))[1:]
                kept = [floor["seconds"] / ours["seconds"] for ours, floor in laps]
                bare = max(floor["samples"] / floor["seconds"] for _, floor in laps)
                cells = [f"{speed(record):,.0f}", f"{bare:,.0f}", harness.spread(kept)]
            rows.append([model, precision, *cells])
    return table(["in turns with a bare loop", "precision", "samples/s", "the bare loop's", "fraction kept"], rows)


def host_syncs(compiles: Sequence[str]) -> str:
    """A table: where the host waits for the device in a training step. There should be no such place."""
    rows = []
    for mode in compiles:
        record = run("trainer.precision=bf16", "trainer.epochs=1", f"trainer.compile={mode}",
                     "strategy._target_=measured.SyncCountingDDP")  # fmt: skip
        cells: list[object] = ["failed", ""]
        if record:
            places = [f"{place} ({times})" for place, times in sorted(record["places"].items())]
            cells = [record["steps"], ", ".join(places) or "nowhere"]
        rows.append([mode, *cells])
    return table(["trainer.compile=", "steps watched", "host syncs in them"], rows)


def parts(quick: bool) -> Iterator[str]:
    """The section's heading and tables, one after the other."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else harness.processor()
    rates = matmul_rates(device, (256,) if quick else (2048, 4096, 8192, 16384))
    compiles = COMPILE[:1] if quick else COMPILE
    about = f"`python bench/gpu.py{' --quick' * quick}`, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}."
    shown = ", ".join(f"{kind} {rate / 1e12:.4g}" for kind, rate in rates.items())
    yield f"## One device: {name}\n\n{about}\nMatmul rate, measured, in TFLOP/s: {shown}.\n"
    yield bare_loops(quick)
    yield throughput(quick, compiles, rates)
    yield to_accuracy(quick, compiles)
    yield cifar10_speed(quick, compiles)
    yield host_syncs(compiles)


def tests() -> str:
    """How the tests that need a GPU ended. A test that wants two GPUs may be skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests"]
    try:
        done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, timeout=60 * TESTS_MINUTES)
    except subprocess.TimeoutExpired:
        return f"| failed: `pytest -m gpu tests` took more than {TESTS_MINUTES} minutes |\n"
    print(done.stdout)
    last = done.stdout.strip().rpartition("\n")[2]
    return (
        f"`pytest -m gpu tests`: {last}.\n" if done.returncode == 0 else f"| failed: `pytest -m gpu tests`: {last} |\n"
    )


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
    found = []
    if asked.all:
        ENDS[0] = time.time() + 60 * MINUTES
        found.append(tests())
    for part in parts(asked.quick):
        print(part, flush=True)  # so that a later failure loses nothing
        found.append(part)
    if asked.all:
        found[:2] = found[1::-1]  # the heading first
        put_into_results("\n".join(found))
    harness.save(asked.out, "gpu", "\n".join(found))
    if any("| failed" in part for part in found):
        sys.exit("a run failed, or had no time left: see above")


if __name__ == "__main__":
    main()
