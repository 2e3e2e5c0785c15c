"""One GPU: MNIST to 99 %, CIFAR-10-shaped throughput, and how much of the card's own matmul rate that is.

python bench/gpu.py [--quick] [--write[=FILE]]

Every run is the command `python src/train.py` with backend=auto: nccl and one rank where there is a GPU, gloo where
there is none. MNIST is read from LOCKSTEP_DATA; without it the digits inside scikit-learn are used. The CIFAR-10-shaped
images are noise. --write: put the tables, under the device's name, into bench/RESULTS.md or FILE.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from harness import ROOT, TRAIN, table

COMPILE = ("false", "true", "reduce-overhead")  # trainer.compile; the last one records CUDA graphs
MATMUL_SECONDS = 0.3  # that a matmul rate is measured for


def run(folder: Path, *overrides: str) -> dict[str, Any] | None:
    """The record of one command, see bench/measured.py, with "began"; None if it failed."""
    folder.mkdir()
    # A step that logs waits for the device, so runs log once an epoch.
    quiet = ["logging.every=1000000", "snapshot.keep_last=1", "+logger.measured._target_=measured.EpochRecorder"]
    command = [sys.executable, TRAIN, f"hydra.run.dir={folder}", *quiet, *overrides]
    began = time.time()
    env = {"PYTHONPATH": str(ROOT / "bench"), "BENCH_RECORD": str(folder / "record")}
    record = folder / "record.0"
    if harness.run_on_terminal(command, folder, env) or not record.exists():
        print((folder / "console.log").read_text()[-3000:], file=sys.stderr)
        return None
    return {"began": began, **json.loads(record.read_text())}


def speed(record: dict[str, Any], skip: int = 0) -> float:
    """Samples per second of the fastest epoch."""
    return max(lap["samples"] / lap["seconds"] for lap in record["training"][skip:])


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
    product, best, until = one @ other, float("inf"), time.perf_counter() + MATMUL_SECONDS
    while time.perf_counter() < until:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(10):
            torch.mm(one, other, out=product)
        synchronize(device)
        best = min(best, (time.perf_counter() - began) / 10)
    return best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def training_flops(*overrides: str) -> float:
    """Floating-point operations of a training step on one sample, as torch counts them. Computes none of them."""
    from torch.utils.flop_counter import FlopCounterMode

    from lockstep.config.instantiate import instantiate
    from support.configs import composed

    cfg = composed(*overrides)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        instantiate(cfg.model)(torch.empty(8, *cfg.dataset.shape)).sum().backward()
    return counter.get_total_flops() / 8


def to_accuracy(out: Path, quick: bool, compiles: Sequence[str]) -> str:
    """A table: MNIST to 99 % accuracy, from the command and from the first step."""
    if "LOCKSTEP_DATA" in os.environ and not quick:
        data, goal, recipe = "mnist", 0.99, ["trainer.batch_size=256", "optimizer.lr=0.1", "trainer.epochs=2"]
    else:
        data, goal, recipe = "digits", 0.95, ["trainer.epochs=3"]
    rows = []
    for mode in compiles:
        record = run(out / f"{data}-{mode}", f"dataset={data}", "optimizer.nesterov=true", "trainer.precision=bf16",
                     f"trainer.compile={mode}", "strategy._target_=measured.MeasuredDDP", *recipe)  # fmt: skip
        if record is None:
            rows.append([mode, "failed", "", "", ""])
            continue
        reached = [moment for moment, accuracy in record["evaluations"] if accuracy >= goal]
        starts = record["began"], record["first_step"]
        times = [f"{reached[0] - start:.2f} s" if reached else "-" for start in starts]
        rows.append([mode, f"{speed(record):,.0f}", f"{record['evaluations'][-1][1]:.4f}", *times])
    head = f"{data}, convnet, bf16, trainer.compile="
    return table(
        [head, "samples/s", "test accuracy", f"{goal:.0%} from the command", f"{goal:.0%} from the first step"], rows
    )


def throughput(out: Path, quick: bool, compiles: Sequence[str], rates: dict[str, float]) -> str:
    """A table: samples/s of a ResNet-18 and what share of the matmul rate that is, by batch size and precision."""
    samples, batches = (32, (16,)) if quick else (50_000, (128, 512, 2048))
    model = ["dataset=cifar10", "model=resnet18"]
    data = ["dataset.prepare=null", "~dataset.train.data_dir", "~dataset.test.data_dir"]
    data += [f"dataset.{part}._target_=measured.noise" for part in ("train", "test")]
    data += [f"+dataset.train.samples={samples}", f"+dataset.test.samples={min(samples, 2048)}"]
    flops = training_flops(*model)
    cases = [(precision, batch, "false") for precision in ("fp32", "bf16") for batch in batches]
    cases += [("bf16", batches[-1], mode) for mode in compiles[1:]]
    rows = []
    for precision, batch, mode in cases:
        record = run(out / f"cifar-{precision}-{batch}-{mode}", *model, *data, f"trainer.precision={precision}",
                     f"trainer.batch_size={batch}", f"trainer.compile={mode}", "trainer.epochs=3", "evaluation.every=3",
                     "snapshot.every=3epochs", "strategy._target_=measured.MeasuredDDP")  # fmt: skip
        if record is None:
            rows.append([precision, batch, mode, "failed", "", "", ""])
            continue
        kind = "tf32" if precision == "fp32" and "tf32" in rates else precision  # what cuDNN convolves float32 in
        rate = speed(record, skip=1)
        memory = f"{record['GiB']:.1f} GiB" if record["GiB"] else ""
        share = f"{rate * flops / rates[kind]:.0%} of {kind}"
        rows.append([precision, batch, mode, f"{rate:,.0f}", f"{rate * flops / 1e12:.4g}", share, memory])
    head = f"ResNet-18 on 3x32x32, {flops / 1e9:.2f} GFLOP a sample"
    return table([head, "batch", "trainer.compile=", "samples/s", "TFLOP/s", "of its matmul rate", "peak memory"], rows)


def host_syncs(out: Path, compiles: Sequence[str]) -> str:
    """A table: where the host waits for the device in a training step. There should be no such place."""
    rows = []
    for mode in compiles:
        record = run(out / f"waits-{mode}", "trainer.precision=bf16", "trainer.epochs=1", f"trainer.compile={mode}",
                     "strategy._target_=measured.SyncCountingDDP")  # fmt: skip
        if record is None:
            rows.append([mode, "failed", "", ""])
            continue
        places = ", ".join(f"{place} ({times})" for place, times in sorted(record["places"].items()))
        rows.append([mode, record["steps"], sum(record["places"].values()), places or "nowhere"])
    return table(["trainer.compile=", "steps watched", "host syncs in them", "where"], rows)


def main() -> None:
    arguments = harness.parser(__doc__, "gpu")
    arguments.add_argument("--write", nargs="?", type=Path, const=harness.RESULTS, help="put the tables into this file")
    asked = harness.parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else harness.processor()
    rates = matmul_rates(device, (256,) if asked.quick else (2048, 4096, 8192, 16384))
    compiles = COMPILE[:1] if asked.quick else COMPILE
    text = f"## One device: {name}\n\n`python bench/gpu.py{' --quick' * asked.quick}`, torch {torch.__version__}, "
    text += f"{time.strftime('%Y-%m-%d')}.\nMatmul rate, measured, in TFLOP/s: "
    text += ", ".join(f"{kind} {rate / 1e12:.4g}" for kind, rate in rates.items()) + ".\n"
    print(text, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for measure in (
            lambda: to_accuracy(out, asked.quick, compiles),
            lambda: throughput(out, asked.quick, compiles, rates),
            lambda: host_syncs(out, compiles),
        ):
            part = measure()
            print(part, flush=True)  # so that a later failure loses nothing
            text += "\n" + part
    harness.save(asked.out, "gpu", text)
    if asked.write:
        harness.write_section(text, asked.write)
    if "| failed" in text:
        sys.exit("a run failed, see above")


if __name__ == "__main__":
    main()
