"""One GPU: the tests that need one, speeds beside bare loops, and how much of the card's own matmul rate that is.

python bench/gpu.py [--quick] [--all] [--out=outputs/gpu]

--all is `make gpu`: the tests run first, and the tables go into bench/RESULTS.md. All of it takes at most `MINUTES`,
and each part its own time at most: what tells most in a minute comes first, and a part that finds no time left is
named. Rows are written as soon as they are measured. Without a GPU a sentence says so, and nothing is done.

Every run is the command `python src/train.py` with backend=auto: nccl and one rank where there is a GPU, gloo where
there is none. MNIST is read from LOCKSTEP_DATA; without it the digits inside scikit-learn are used. The CIFAR-10-shaped
images are noise. OUT/gpu.md is a section for bench/RESULTS.md, and OUT/console.log is what the tests printed.
"""

import multiprocessing
import os
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
MATMUL_SECONDS = 0.3  # that a matmul rate is measured for
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


def device_and_rates(sizes: Sequence[int]) -> tuple[str, dict[str, float]]:
    """The device's name, and {type: the best rate, in FLOP/s, of products of square matrices}.

    For a process of its own: what it takes of a GPU's memory would be missing in the runs.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else harness.processor()
    types = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
    if device.type == "cpu":
        types.pop("tf32")
    rates: dict[str, float] = {}
    for kind, dtype in types.items():
        torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
        rates[kind] = max(2 * size**3 / matmul_seconds(device, dtype, size) for size in sizes)
    return name, rates


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

    def row(model: str, precision: str) -> list[object]:
        record = run(*data[model], f"model={model}", f"trainer.precision={precision}", "trainer.epochs=3",
                     *harness.BESIDE_FLOORS, "evaluation.every=3", "snapshot.every=3epochs")  # fmt: skip
        if not record:
            return [model, precision, "failed", "", ""]
        laps = list(zip(record["training"], record["bare loop"], strict=True))[1:]
        kept = [floor["seconds"] / ours["seconds"] for ours, floor in laps]
        bare = max(floor["samples"] / floor["seconds"] for _, floor in laps)
        return [model, precision, f"{speed(record):,.0f}", f"{bare:,.0f}", harness.spread(kept)]

    rows = (row(model, precision) for model in data for precision in (("fp32",) if quick else ("fp32", "bf16")))
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


def throughput(quick: bool, compiles: Sequence[str], rates: dict[str, float]) -> Iterator[str]:
    """Samples/s of a ResNet-18 and what share of the matmul rate that is: of each batch size and precision.

    Where it is compiled, of the largest batch in bf16.
    """
    samples, batches = (32, (16,)) if quick else (50_000, (128, 512, 2048))
    data = [*harness.noise_images(samples, min(samples, 2048)), "model=resnet18"]
    flops = harness.training_flops("dataset=cifar10", "model=resnet18")

    def row(precision: str, batch: int, mode: str) -> list[object]:
        record = run(*data, f"trainer.precision={precision}", f"trainer.batch_size={batch}", f"trainer.compile={mode}",
                     "trainer.epochs=3", "evaluation.every=3", "snapshot.every=3epochs")  # fmt: skip
        if not record:
            return [precision, batch, mode, "failed", "", "", ""]
        kind = "tf32" if precision == "fp32" and "tf32" in rates else precision  # what cuDNN convolves float32 in
        rate = speed(record)
        share = f"{rate * flops / rates[kind]:.0%} of {kind}" if kind in rates else "-"
        memory = f"{record['GiB']:.1f} GiB" if record["GiB"] else ""
        return [precision, batch, mode, f"{rate:,.0f}", f"{rate * flops / 1e12:.4g}", share, memory]

    cases = [("bf16", batches[-1], mode) for mode in compiles]
    if compiles == COMPILE[:1]:
        precisions = ("fp32",) if quick else ("bf16", "fp32")  # some CPUs make two samples a second in bf16
        cases = [(precision, batch, "false") for precision in precisions for batch in batches]
    head = [f"ResNet-18 on 3x32x32, {flops / 1e9:.2f} GFLOP a sample", "batch", "trainer.compile=", "samples/s"]
    head += ["TFLOP/s", "of its matmul rate", "peak memory"]
    return growing(head, (row(*case) for case in cases))


def to_accuracy(quick: bool, compiles: Sequence[str]) -> Iterator[str]:
    """MNIST to 99 % accuracy, from the command and from the first step."""
    if "LOCKSTEP_DATA" in os.environ and not quick:
        data, goal, recipe = "mnist", 0.99, ["trainer.batch_size=256", "optimizer.lr=0.1", "trainer.epochs=2"]
    else:
        data, goal, recipe = "digits", 0.95, ["trainer.epochs=3"]

    def row(mode: str) -> list[object]:
        record = run(f"dataset={data}", "optimizer.nesterov=true", "trainer.precision=bf16", f"trainer.compile={mode}",
                     *recipe)  # fmt: skip
        if not record:
            return [mode, "failed", "", "", ""]
        reached = [moment for moment, accuracy in record["evaluations"] if accuracy >= goal]
        times = [f"{reached[0] - record[start]:.2f} s" if reached else "-" for start in ("began", "first_step")]
        return [mode, f"{speed(record):,.0f}", f"{record['evaluations'][-1][1]:.4f}", *times]

    head = [f"{data}, convnet, bf16, trainer.compile=", "samples/s", "test accuracy", f"{goal:.0%} from the command"]
    return growing([*head, f"{goal:.0%} from the first step"], map(row, compiles))


def sharded_snapshots(quick: bool) -> Iterator[str]:
    """Samples/s of a perceptron of 6 layers under fsdp, without snapshots and with one in every 10 steps."""
    samples, width = (640, 64) if quick else (6400, 4096)
    run_of = ["strategy=fsdp", "dataset=random", "trainer.batch_size=64", "trainer.epochs=3"]
    run_of += [f"dataset.samples={samples}", "model=mlp", "model.depth=6", f"model.width={width}", "optimizer=adamw"]

    def row(every: str) -> list[object]:
        record = run(*run_of, f"snapshot.every={every}")
        return [every, f"{speed(record):,.0f}" if record else "failed"]

    return growing(["strategy=fsdp snapshot.every=", "samples/s"], map(row, ["3epochs", "10steps"]))


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
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        sizes = (256,) if asked.quick else (2048, 4096, 8192, 16384)
        name, rates = pool.apply_async(device_and_rates, [sizes]).get(60)
    about = f"`python bench/gpu.py{' --quick' * asked.quick}`, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}."
    shown = ", ".join(f"{kind} {rate / 1e12:.4g}" for kind, rate in rates.items())
    found = {"": f"## One device: {name}\n\n{about}\nMatmul rate, measured, in TFLOP/s: {shown}.\n"}
    plain, compiled = COMPILE[:1], () if asked.quick else COMPILE[1:]
    parts: dict[str, tuple[float, Any]] = {  # minutes, and what is called
        "tests": (2.5, lambda: tests(asked.out)),
        "host waits": (0.5, lambda: host_syncs(plain)),
        "bare loops": (2.5, lambda: bare_loops(asked.quick)),
        "cifar10_speed": (0.5, lambda: cifar10_speed(asked.quick, plain)),
        "throughput": (1.5, lambda: throughput(asked.quick, plain, rates)),
        "accuracy": (0.5, lambda: to_accuracy(asked.quick, plain)),
        "cifar10_speed, compiled": (1.5, lambda: cifar10_speed(asked.quick, compiled)),
        "host waits, compiled": (1, lambda: host_syncs(compiled)),
        "throughput, compiled": (1.5, lambda: throughput(asked.quick, compiled, rates)),
        "sharded snapshots": (1, lambda: sharded_snapshots(asked.quick)),
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
