"""Time to quality: seconds until a net is as good as a published recipe makes it. The whole commands, in turns.

text: nanoGPT's recipe for a CPU (2000 steps of 12 x 64 characters of tinyshakespeare) beside
experiment=shakespeare_speed. The loss is that of the whole last tenth of the text.
images: the ResNet-18 of torchvision's references, until its test accuracy is 0.55, and it does not get much further,
beside two epochs of experiment=image_folder_speed, with decoding. Both train on cifar10_small.tar in the data's folder,
10,000 JPEGs of 32x32 pixels in 10 classes.
mnist: pytorch/examples/mnist, until its test accuracy is 0.99, beside one epoch of experiment=mnist_airbench.
"""

import json
import math
import os
import re
import resource
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import harness

from lockstep.runs.stats import estimate

sys.path.append(str(harness.CONTENDERS))
Quality = Callable[[Path], float]  # of the folder of a command that has ended


def loss_of_nanogpt(folder: Path) -> float:
    """The mean loss of its last weights over blocks of the validation text side by side, as Lockstep has it."""
    import nanogpt
    import numpy as np
    import torch

    weights = torch.load(folder / "ckpt.pt", weights_only=True)["model"]
    net = nanogpt.GPT(len(weights["lm_head.weight"])).eval()
    net.load_state_dict(weights)
    tokens = torch.from_numpy(np.fromfile(folder / "val.bin", np.uint16).astype(np.int64))
    count = (len(tokens) - 1) // nanogpt.BLOCK * nanogpt.BLOCK
    inputs, targets = (tokens[start : start + count].view(-1, nanogpt.BLOCK) for start in (0, 1))
    with torch.no_grad():
        return float(net(inputs, targets))


def last_accuracy(folder: Path) -> float:
    return float(re.findall(r"test accuracy ([\d.]+)", (folder / "console.log").read_text())[-1])


def timed(name: str, command: Sequence[str], quality: Quality) -> tuple[float, float, float]:
    """(CPU-seconds, seconds, quality) of one command in an empty folder."""
    with tempfile.TemporaryDirectory() as place:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        harness.run_whole(command, Path(place), limit=3600)
        seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        found = quality(Path(place))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{name}: {cpu:.1f} CPU-seconds, {seconds:.1f} s, {found:.4f}", flush=True)
    return cpu, seconds, found


def ratio(ours: Sequence[float], others: Sequence[float]) -> str:
    """How many times as long the others take: the mean of the rounds, and its interval of 95 %."""
    known = estimate([math.log(other / own) for own, other in zip(ours, others, strict=True)])
    ends = "-".join(f"{math.exp(end):.2f}" for end in known.interval or ())
    return f"{math.exp(known.mean):.2f}{f' ({ends})' * bool(ends)}"


def rivals(part: str, data: str, folder: Path, quick: bool) -> tuple[str, str, list[str], Quality, list[str]]:
    """Metric; name, command and quality of the others; our overrides."""
    if part == "text":
        # 8 times 250 steps, after each of which it estimates its loss
        theirs = [f"--samples={120 if quick else 3000}", "--epochs=8", "--batch=12"]
        ours = ["experiment=shakespeare_speed", f"data_dir={data}", *["dataset.samples=120"] * quick]
        return "loss", "nanoGPT", ["nanogpt.py", *theirs], loss_of_nanogpt, ours
    if part == "images":
        with tarfile.open(Path(data) / "cifar10_small.tar") as packed:
            packed.extractall(folder, filter="data")
        theirs = [f"--images={folder}", "--size=32", "--batch=32", "--resnet18"]
        theirs += ["--epochs=1"] if quick else ["--epochs=30", "--until=0.55"]
        # All of the training data, as there. Decoding counts: its folder is in that of the run.
        ours = ["experiment=image_folder_speed", f"dataset.root={folder}", "loader.validation=null"]
        ours += ["dataset.cache_dir=decoded", f"trainer.epochs={1 if quick else 2}"]
        return "accuracy", "references", ["references.py", *theirs], last_accuracy, ours
    theirs = ["--epochs=1", "--samples=1280"] if quick else ["--epochs=14", "--until=0.99"]
    ours = ["experiment=mnist_airbench", f"data_dir={data}", "trainer.epochs=1", *["trainer.max_steps=5"] * quick]
    return "accuracy", "PyTorch's example", ["example_mnist.py", "--batch=64", *theirs], last_accuracy, ours


def table(part: str, folder: Path, rounds: int, quick: bool) -> str:
    data = os.environ["LOCKSTEP_DATA"] = str(Path(os.environ.get("LOCKSTEP_DATA", "data")).resolve())
    metric, name, (script, *options), quality, overrides = rivals(part, data, folder, quick)
    theirs = partial(timed, name, [str(harness.CONTENDERS / script), *options], quality)

    def ours() -> tuple[float, float, float]:
        def tested(folder: Path) -> float:
            return float(json.loads((folder / "run" / "run.json").read_text())["test"]["metrics"][metric])

        return timed("Lockstep", [harness.TRAIN, *overrides, "hydra.run.dir=run"], tested)

    found = harness.interleave({name: theirs, "Lockstep": ours}, rounds)
    columns = {way: list(zip(*runs, strict=True)) for way, runs in found.items()}
    rows = [[way, *map(harness.spread, figures)] for way, figures in columns.items()]
    rows.append(["ratio, interval of 95 %", *map(ratio, columns["Lockstep"][:2], columns[name][:2]), "-"])
    return harness.table([part, "CPU-seconds", "seconds", metric], rows)


if __name__ == "__main__":
    harness.run_parts(__doc__, "quality", 10, **{part: partial(table, part) for part in ("text", "images", "mnist")})
