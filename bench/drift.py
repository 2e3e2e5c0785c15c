"""How far batch norm per rank (sync_bn=off) takes a run from the same run on one rank, step by step.

python bench/drift.py [--out=outputs/drift]

Trains tests/promise.py's convnet in float64 on 1, 2, 4 and 8 ranks, with and without sync_bn, and writes a table and a plot.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]


def weights(folder):
    """(steps, weights): every snapshot's weights, a step each."""
    import torch

    from lockstep import snapshot

    nets = [torch.load(path, weights_only=True)["model"] for path in reversed(snapshot.complete(folder / "snapshots"))]
    return torch.stack([torch.cat([value.flatten() for value in net.values() if value.is_floating_point()]) for net in nets])


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=ROOT / "outputs" / "drift")
    out = options.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    import promise
    from conftest import events

    alone, curves, lines = None, {}, ["| ranks | sync_bn | weights differ by | test loss | test accuracy |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for sync_bn, sizes in (("off", (1, 2, 4, 8)), ("on", (8,))):
            for size in sizes:
                run = promise.in_ranks(size, Path(folder) / f"{sync_bn}-{size}", f"sync_bn={sync_bn}", "trainer.precision=fp64")
                mine = weights(run)
                alone = mine if alone is None else alone
                drift = (mine - alone).norm(dim=1) / alone.norm(dim=1)
                curves[f"{size} ranks, sync_bn={sync_bn}"] = drift.tolist()
                loss, accuracy = (events(run)[tag][-1][1] for tag in ("test/loss", "test/accuracy"))
                lines.append(f"| {size} | {sync_bn} | {drift[-1]:.1e} | {loss:.4f} | {accuracy:.4f} |")
                print(lines[-1], flush=True)
    (out / "drift.md").write_text("\n".join(lines) + "\n")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit(f"no plot without matplotlib; type {sys.executable} -m pip install -r requirements-bench.txt")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in list(curves.items())[1:]:
        axes.plot(range(1, len(curve) + 1), curve, label=name)
    axes.set(xlabel="optimizer steps", ylabel="weights, relative distance from one rank", yscale="log")
    axes.legend()
    figure.savefig(out / "drift.png", dpi=120)


if __name__ == "__main__":
    main()
