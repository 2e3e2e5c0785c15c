"""Time to quality: seconds until a net is as good as a published recipe makes it. The whole commands, in turns.

python bench/quality.py [--quick] [--rounds=10]

text: nanoGPT's recipe for a CPU (2000 steps of 12 x 64 characters of tinyshakespeare) beside
`python src/train.py experiment=shakespeare_speed`. The loss is that of the whole last tenth of the text.
"""

import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import harness
from harness import CONTENDERS, TRAIN

sys.path.append(str(CONTENDERS))
STEPS, STEPS_BETWEEN_ESTIMATES, BATCH, BLOCK = 2000, 250, 12, 64
NAMES = ("nanoGPT", "Lockstep")


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


def loss_of_lockstep(folder: Path) -> float:
    import json

    return float(json.loads((folder / "run" / "run.json").read_text())["test"]["metrics"]["loss"])


def run(name: str, data: str, share: int) -> tuple[float, float, float]:
    """(CPU-seconds, seconds, loss) of one command. share: every so many steps of the recipe are made."""
    per_epoch = STEPS_BETWEEN_ESTIMATES // share * BATCH
    epochs = STEPS // STEPS_BETWEEN_ESTIMATES
    commands = {
        "nanoGPT": [
            str(CONTENDERS / "nanogpt.py"), f"--data={data}", f"--batch={BATCH}", f"--samples={per_epoch}",
            f"--epochs={epochs}",
        ],
        "Lockstep": [TRAIN, "experiment=shakespeare_speed", f"data_dir={data}", "hydra.run.dir=run",
                     *([f"dataset.samples={BATCH * 10}"] if share > 1 else [])],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        code = harness.run_on_terminal([sys.executable, *commands[name]], Path(place))
        seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        if code:
            sys.exit(f"{name} ended with {code}:\n{(Path(place) / 'console.log').read_text()[-2000:]}")
        loss = loss_of_nanogpt(Path(place)) if name == "nanoGPT" else loss_of_lockstep(Path(place))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{name}: {cpu:.1f} CPU-seconds, {seconds:.1f} s, loss {loss:.4f}", flush=True)
    return cpu, seconds, loss


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
    args = harness.parse(harness.parser(__doc__, "quality", rounds=10))
    data, share = os.environ.get("LOCKSTEP_DATA", "data"), 25 if args.quick else 1
    runs = harness.interleave({name: lambda name=name: run(name, data, share) for name in NAMES}, args.rounds)
    columns = {name: list(zip(*found, strict=True)) for name, found in runs.items()}
    rows = [[name, *map(harness.spread, columns[name])] for name in NAMES]
    ratios = [ratio(ours, others) for ours, others in zip(columns["Lockstep"], columns["nanoGPT"], strict=True)]
    rows.append(["ratio, interval of 95 %", *ratios[:2], "-"])
    text = f"{harness.processor()}, {args.rounds} rounds\n\n"
    harness.save(args.out, "text", text + harness.table(["", "CPU-seconds", "seconds", "loss"], rows))


if __name__ == "__main__":
    main()
