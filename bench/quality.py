"""Time to quality: seconds until a net is as good as a published recipe makes it. The whole commands, in turns.

python bench/quality.py [--quick] [--rounds=10] [--only=text,images,mnist]

text: nanoGPT's recipe for a CPU (2000 steps of 12 x 64 characters of tinyshakespeare) beside
`python src/train.py experiment=shakespeare_speed`. The loss is that of the whole last tenth of the text.

images: the ResNet-18 of torchvision's references, 30 epochs with a smaller learning rate after each 10, which ends as
soon as its test accuracy is ACCURACY, beside two epochs of `python src/train.py experiment=image_folder_speed`, with
decoding. Both train on 10,000 JPEGs of 32x32 pixels in 10 classes, cifar10_small.tar in the data's folder.

mnist: PyTorch's example (pytorch/examples/mnist), until its test accuracy is 0.99, beside one epoch of
`python src/train.py experiment=mnist_airbench`, which has a quarter of its steps.
"""

import atexit
import math
import os
import re
import resource
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
from harness import CONTENDERS, TRAIN

sys.path.append(str(CONTENDERS))
STEPS, STEPS_BETWEEN_ESTIMATES, BATCH, BLOCK = 2000, 250, 12, 64
MNIST_ACCURACY = 0.99
ACCURACY = 0.55  # of the test images: the ResNet-18 does not get much further, see bench/RESULTS.md


def loss_of_nanogpt(folder: Path) -> float:
    """The mean loss of its last weights over blocks of the validation text side by side, as Lockstep has it."""
    import nanogpt
    import numpy as np
    import torch

    weights = torch.load(folder / "ckpt.pt")["model"]
    net = nanogpt.GPT(len(weights["wte.weight"]))
    net.load_state_dict(weights)
    tokens = torch.from_numpy(np.fromfile(folder / "val.bin", np.uint16).astype(np.int64))
    count = (len(tokens) - 1) // BLOCK
    inputs, targets = (tokens[start : start + count * BLOCK].view(count, BLOCK) for start in (0, 1))
    with torch.no_grad():
        return float(net(inputs, targets))


def quality_of_lockstep(metric: str, folder: Path) -> float:
    """A metric of the test of a run."""
    import json

    return float(json.loads((folder / "run" / "run.json").read_text())["test"]["metrics"][metric])


def last_accuracy(folder: Path) -> float:
    return float(re.findall(r"test accuracy ([\d.]+)", (folder / "console.log").read_text())[-1])


def timed(name: str, command: Sequence[str], quality: Callable[[Path], float]) -> tuple[float, float, float]:
    """(CPU-seconds, seconds, quality) of one command, whose run folder is `run` where it has one."""
    with tempfile.TemporaryDirectory() as place:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        code = harness.run_on_terminal([sys.executable, *command], Path(place), limit=3600)
        seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        if code:
            sys.exit(f"{name} ended with {code}:\n{(Path(place) / 'console.log').read_text()[-2000:]}")
        found = quality(Path(place))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{name}: {cpu:.1f} CPU-seconds, {seconds:.1f} s, {found:.4f}", flush=True)
    return cpu, seconds, found


def text(data: str, quick: bool) -> dict[str, Callable[[], Any]]:
    share = 25 if quick else 1  # every so many steps of the recipe are made
    per_epoch, epochs = STEPS_BETWEEN_ESTIMATES // share * BATCH, STEPS // STEPS_BETWEEN_ESTIMATES
    theirs = [str(CONTENDERS / "nanogpt.py"), f"--data={data}", f"--batch={BATCH}"]
    theirs += [f"--samples={per_epoch}", f"--epochs={epochs}"]
    ours = [TRAIN, "experiment=shakespeare_speed", f"data_dir={data}", "hydra.run.dir=run"]
    ours += [f"dataset.samples={BATCH * 10}"] if quick else []
    return {
        "nanoGPT": partial(timed, "nanoGPT", theirs, loss_of_nanogpt),
        "Lockstep": partial(timed, "Lockstep", ours, partial(quality_of_lockstep, "loss")),
    }


def images(data: str, quick: bool) -> dict[str, Callable[[], Any]]:
    folder = tempfile.mkdtemp(prefix="lockstep-quality-")
    atexit.register(shutil.rmtree, folder)
    with tarfile.open(Path(data) / "cifar10_small.tar") as packed:
        packed.extractall(folder, filter="data")
    theirs = [str(CONTENDERS / "references_images.py"), f"--data={folder}", "--size=32", "--batch=32", "--resnet18"]
    theirs += ["--epochs=1"] if quick else ["--epochs=30", f"--until={ACCURACY}"]
    ours = [TRAIN, "experiment=image_folder_speed", f"dataset.root={folder}", "hydra.run.dir=run"]
    ours += ["loader.validation=null", f"dataset.cache_dir={folder}/decoded"]  # all of the training data, as there
    ours += [f"trainer.epochs={1 if quick else 2}"]

    def run_lockstep() -> tuple[float, float, float]:
        shutil.rmtree(f"{folder}/decoded", ignore_errors=True)  # decoding counts
        return timed("Lockstep", ours, partial(quality_of_lockstep, "accuracy"))

    return {"references": partial(timed, "references", theirs, last_accuracy), "Lockstep": run_lockstep}


def mnist(data: str, quick: bool) -> dict[str, Callable[[], Any]]:
    theirs = [str(CONTENDERS / "example_mnist.py"), f"--data={data}"]
    theirs += ["--epochs=1", "--samples=1280"] if quick else [f"--until={MNIST_ACCURACY}"]
    ours = [TRAIN, "experiment=mnist_airbench", f"data_dir={data}", "trainer.epochs=1", "hydra.run.dir=run"]
    ours += ["trainer.max_steps=5"] if quick else []
    return {
        "PyTorch's example": partial(timed, "PyTorch's example", theirs, last_accuracy),
        "Lockstep": partial(timed, "Lockstep", ours, partial(quality_of_lockstep, "accuracy")),
    }


def ratio(ours: Sequence[float], others: Sequence[float]) -> str:
    """How many times as long the others take: the mean of the rounds, and its interval of 95 %."""
    from scipy import stats

    logs = [math.log(other / own) for own, other in zip(ours, others, strict=True)]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return f"{math.exp(middle):.2f}"
    half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / len(logs) ** 0.5
    return f"{math.exp(middle):.2f} ({math.exp(middle - half):.2f}-{math.exp(middle + half):.2f})"


def main() -> None:
    args = harness.parse(harness.parser(__doc__, "quality", ["text", "images", "mnist"], rounds=10))
    data = os.environ.get("LOCKSTEP_DATA", "data")
    parts = (("text", text, "loss"), ("images", images, "accuracy"), ("mnist", mnist, "accuracy"))
    for part, ways, quality in parts:
        if part not in args.only:
            continue
        runs = harness.interleave(ways(data, args.quick), args.rounds)
        columns = {name: list(zip(*found, strict=True)) for name, found in runs.items()}
        rows = [[name, *map(harness.spread, columns[name])] for name in columns]
        others, ours = columns.values()
        rows.append(["ratio, interval of 95 %", *map(ratio, ours[:2], others[:2]), "-"])
        head = ["", "CPU-seconds", "seconds", quality]
        harness.save(args.out, part, f"{harness.processor()}, {args.rounds} rounds\n\n{harness.table(head, rows)}")


if __name__ == "__main__":
    main()
