"""What each way of averaging gradients costs: time, bytes and loss, for the same net on the same samples.

python bench/compare.py [--worlds=2,4,8] [--syncs=all_reduce,ring,...] [--width=1024] [--out=outputs/compare]

Every run is src/train.py's own work(), on ranks forked from one import. Bytes are counted, not computed: what the kernel
says has left each rank's TCP sockets while it trained, which includes gloo's headers and the ranks' votes on stopping.
The formula stands beside it.
"""

import argparse
import os
import socket
import struct
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "bench")]

EVERY = 8  # steps between two averages of local_sgd: a divisor of an epoch's 24
BATCH = 60
FORMULAS = {  # what a rank sends in a step, in gradients' bytes: (the text, rank 0, the others), W ranks
    "all_reduce": ("2(W-1)/W", lambda w: 2 * (w - 1) / w, lambda w: 2 * (w - 1) / w),
    "ring": ("2(W-1)/W", lambda w: 2 * (w - 1) / w, lambda w: 2 * (w - 1) / w),
    "parameter_server": ("W-1; others 1", lambda w: w - 1, lambda w: 1),
    "bf16": ("(W-1)/W", lambda w: (w - 1) / w, lambda w: (w - 1) / w),
    "local_sgd": (f"2(W-1)/W/{EVERY}", lambda w: 2 * (w - 1) / w / EVERY, lambda w: 2 * (w - 1) / w / EVERY),
}

measured = []  # of each epoch: (seconds, bytes sent, optimizer steps)


def bytes_sent():
    """Bytes that this process has sent by TCP, each counted once, over the sockets it has open (Linux >= 4.19)."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(descriptor))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    sent, again = struct.unpack_from("QQ", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 200)  # tcpi_bytes_sent, _retrans
                    total += sent - again
        except OSError:  # no socket, or closed meanwhile
            pass
    return total


def train(run, loader, after_step):
    """loop.train with a meter on the wire: what conf calls `loop`."""
    from lockstep import loop

    steps, sent, began = run.progress.step, bytes_sent(), time.perf_counter()
    figures = loop.train(run, loader, after_step)
    global parameters
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    measured.append((time.perf_counter() - began, bytes_sent() - sent, run.progress.step - steps))
    return figures


def rank(cfg):
    """One rank's life: the net's parameters, the seconds and the bytes of a step after the first epoch, and the test loss."""
    import compare  # this file as the config knows it

    import train as lockstep

    loss = lockstep.work(cfg)
    seconds, sent, steps = (sum(column) for column in zip(*compare.measured[1:], strict=True))
    return {"parameters": compare.parameters, "seconds": seconds / steps, "sent": sent / steps, "loss": loss}


def run(sync, size, width, folder):
    """One row of the table, from a training over `size` ranks."""
    from conftest import in_world
    from test_configs import composed

    overrides = [
        f"gradient_sync={sync}", f"run_dir={folder}", "loop._target_=compare.train", "objective=test/loss", "model=mlp", f"model.width={width}",
        f"trainer.batch_size={BATCH}", "trainer.epochs=4", "trainer.eval_every=4", "trainer.save_every=4epochs", "trainer.log_every=1000",
        *([f"gradient_sync.every={EVERY}"] if sync == "local_sgd" else []),
    ]  # fmt: skip
    leader, *others = in_world(size, rank, composed(*overrides), limit=1800)
    text, of_leader, of_others = FORMULAS[sync]
    return {
        "ranks": size, "sync": sync, "formula": text, "ms": 1000 * max(other["seconds"] for other in others), "loss": leader["loss"],
        "leader": leader["sent"], "leader_formula": 4 * leader["parameters"] * of_leader(size),
        "others": max(other["sent"] for other in others), "others_formula": 4 * leader["parameters"] * of_others(size),
    }  # fmt: skip


def table(rows):
    head = ["ranks", "gradient_sync", "sent a step / gradients", "rank 0 sent", "by formula", "others sent", "by formula", "ms a step", "test loss"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        sizes = " | ".join(f"{row[key] / 1e6:.3f} MB" for key in ("leader", "leader_formula", "others", "others_formula"))
        lines.append(f"| {row['ranks']} | {row['sync']} | {row['formula']} | {sizes} | {row['ms']:.1f} | {row['loss']:.6f} |")
    return "\n".join(lines) + "\n"


def plot(rows, path):
    """Time and rank 0's bytes a step over the number of ranks. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for sync in dict.fromkeys(row["sync"] for row in rows):
        mine = [row for row in rows if row["sync"] == sync]
        worlds = [row["ranks"] for row in mine]
        left.plot(worlds, [row["leader"] / 1e6 for row in mine], "o-", label=sync)
        right.plot(worlds, [row["ms"] for row in mine], "o-", label=sync)
    left.set(xlabel="ranks", ylabel="MB that rank 0 sends in a step", ylim=(0, None))
    right.set(xlabel="ranks", ylabel="ms a step", ylim=(0, None))
    left.legend()
    figure.savefig(path, dpi=120)


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--worlds", default="2,4,8")
    options.add_argument("--syncs", default=",".join(FORMULAS))
    options.add_argument("--width", type=int, default=1024, help="of the two hidden layers")
    options.add_argument("--out", type=Path, default=ROOT / "outputs" / "compare")
    asked = options.parse_args()

    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # ranks leave without teardown, and Python would call tqdm's lock leaked
    out, began = asked.out.resolve(), time.strftime("%Y-%m-%d_%H-%M-%S")
    rows = []
    for size in map(int, asked.worlds.split(",")):
        for sync in asked.syncs.split(","):
            rows.append(run(sync, size, asked.width, out / began / f"{sync}-{size}"))
    (out / "compare.md").write_text(table(rows))
    print(table(rows))
    print(f"table: {out / 'compare.md'}")
    try:
        plot(rows, out / "compare.png")
        print(f"plot:  {out / 'compare.png'}")
    except ImportError:
        print(f"no plot without matplotlib; type {sys.executable} -m pip install -r requirements-bench.txt", file=sys.stderr)


if __name__ == "__main__":
    main()
