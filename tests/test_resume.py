"""Stop anywhere, go on anywhere: what a run leaves, and that a resumed one ends where the unbroken one ends."""

import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from conftest import SHORT, TORCHRUN, TRAIN, events, wait_for
from lockstep import snapshot
from lockstep.refusal import Refusal

SLOW = ["model=mlp", "model.width=1024", "trainer.epochs=12", "trainer.batch_size=32", "trainer.save_every=5steps", "trainer.deterministic=true"]


def model(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_resumed_run_ends_with_the_same_bits_as_an_unbroken_one(train, tmp_path):
    adamw = ["optimizer=adamw", "scheduler=one_cycle", "model=mlp", "model.dropout=0.2"]
    whole = train(*adamw, "trainer.epochs=3", "hydra.run.dir=whole", "trainer.save_every=20steps")
    train(*adamw, "trainer.epochs=3", "hydra.run.dir=resumed", f"resume={tmp_path}/whole/snapshots/step_00000040.pt")
    assert same_bits(model(tmp_path / "whole"), model(tmp_path / "resumed"))
    assert [step for step, _ in events(tmp_path / "resumed")["train/loss"]] == [46, 69]
    assert events(tmp_path / "resumed")["train/loss"] == events(tmp_path / "whole")["train/loss"][1:]  # the epoch's whole sum
    assert whole.epochs[1:]


def test_the_same_folder_goes_on_by_itself(train, tmp_path):
    constant = ["scheduler=constant", "model=mlp"]
    train(*constant, "trainer.epochs=3", "hydra.run.dir=whole")
    train(*constant, "trainer.max_steps=30", "hydra.run.dir=same")  # in the middle of the second epoch
    run = train(*constant, "trainer.epochs=3", "hydra.run.dir=same")
    assert "resumed from" in run.output
    assert len(run.epochs) == 2
    assert same_bits(model(tmp_path / "whole"), model(tmp_path / "same"))
    assert [step for step, _ in events(tmp_path / "same")["train/lr"]] == [10, 20, 30, 40, 50, 60]


def test_killed_workers_are_restarted_by_torchrun_and_end_with_the_same_bits(start, tmp_path):
    torchrun = [*TORCHRUN, "--standalone", "--nproc_per_node=2", "--max-restarts=3", TRAIN, *SLOW]
    start(*torchrun, "hydra.run.dir=undisturbed").finish()
    run = start(*torchrun)
    wait_for(lambda: list(tmp_path.glob("outputs/*/*/snapshots/step_*.pt")), "snapshot")
    victim = next(pid for pid in children(run.process.pid) if b"train.py" in cmdline(pid))
    os.kill(victim, signal.SIGKILL)
    run.finish()
    assert run.output.count("resumed from") == 1
    assert same_bits(model(tmp_path / "undisturbed"), model(run.folder))
    steps = [step for step, _ in events(run.folder)["train/running_loss"]]
    assert steps == sorted(set(steps))


def children(pid):
    return [int(child) for child in open(f"/proc/{pid}/task/{pid}/children").read().split()]


def cmdline(pid):
    return open(f"/proc/{pid}/cmdline", "rb").read()


def ranks_under(launcher):
    """The processes of a launcher of ours that train: what it spawned, or what its fork server forked."""
    servers = [pid for pid in children(launcher) if b"forkserver" in cmdline(pid)]
    return [pid for pid in children(launcher) if b"spawn_main" in cmdline(pid)] + [pid for server in servers for pid in children(server)]


@pytest.mark.parametrize(
    ("launch", "who", "number"),
    [
        ("env", "parent", signal.SIGTERM),
        ("spawn", "parent", signal.SIGINT),
        ("spawn", "rank", signal.SIGTERM),
        ("torchrun", "parent", signal.SIGUSR1),
    ],
)
def test_asked_to_stop_all_ranks_save_the_step_and_leave_together(start, tmp_path, launch, who, number):
    run = start(sys.executable, TRAIN, *SLOW, "trainer.epochs=200", f"launch={launch}", "hydra.run.dir=run")
    wait_for(lambda: list(tmp_path.glob("run/snapshots/step_*.pt")), "snapshot")
    ranks = ranks_under(run.process.pid)
    os.kill(run.process.pid if who == "parent" else ranks[-1], number)
    run.finish(75)
    newest = snapshot.complete(tmp_path / "run" / "snapshots")[0]
    step = json.loads(newest.with_suffix(".json").read_text())["step"]
    assert f"stopped early at step {step}; go on there with hydra.run.dir={tmp_path}/run" in run.output
    assert len(ranks) == (0 if launch == "env" else 2)
    assert not [pid for pid in ranks if os.path.exists(f"/proc/{pid}")]


@pytest.mark.parametrize("launch", ["spawn", "torchrun"])
def test_killing_the_launcher_leaves_no_orphan(start, tmp_path, launch):
    run = start(sys.executable, TRAIN, *SLOW, "trainer.epochs=200", f"launch={launch}", "hydra.run.dir=run")
    wait_for(lambda: list(tmp_path.glob("run/snapshots/step_*.pt")), "snapshot")
    ranks = ranks_under(run.process.pid)
    assert len(ranks) == 2
    run.process.kill()
    wait_for(lambda: not [pid for pid in ranks if os.path.exists(f"/proc/{pid}")], "end of the ranks", limit=3)


def test_only_whole_snapshots_count(tmp_path, caplog):
    for step in range(1, 6):
        snapshot.save(tmp_path, f"step_{step:08d}", {"step": step}, last=4, step=step)
    assert len(snapshot.complete(tmp_path)) == 4
    newest, second, third, fourth = snapshot.complete(tmp_path)
    newest.write_bytes(newest.read_bytes()[:-10])  # truncated
    flipped = bytearray(second.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    second.write_bytes(flipped)
    third.with_suffix(".json").unlink()
    state, path = snapshot.load(snapshot.complete(tmp_path))
    assert (state["step"], path) == (2, fourth)
    assert caplog.text.count("damaged") == 3
    fourth.write_bytes(b"")
    with pytest.raises(Refusal, match="none of the 4 snapshots"):
        snapshot.load(snapshot.complete(tmp_path))


def _save_for_ever(folder):
    for step in itertools.count(1):
        snapshot.save(folder, f"step_{step:08d}", {"step": step, "weights": torch.zeros(200_000)}, last=2, step=step)


def test_killed_while_it_writes_a_run_leaves_a_whole_snapshot(tmp_path, caplog):
    for number in range(15):
        process = multiprocessing.get_context("forkserver").Process(target=_save_for_ever, args=[tmp_path / str(number)])
        process.start()
        wait_for(lambda folder=tmp_path / str(number): snapshot.complete(folder), "snapshot")
        time.sleep(random.uniform(0, 0.05))
        process.kill()
        process.join()
        newest = snapshot.complete(tmp_path / str(number))[0]
        assert snapshot.load([newest])[0]["step"] == int(newest.stem[5:])
    assert "damaged" not in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk wants root")
def test_a_full_disk_costs_snapshots_and_curves_but_not_the_training(start, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=True)
    try:
        whole = ["model=mlp", "model.width=128", "trainer.epochs=2", f"hydra.run.dir={disk}"]
        start(sys.executable, TRAIN, *whole, "trainer.max_steps=20").finish()
        (disk / "ballast").write_bytes(bytes(2**21 - sum(path.stat().st_size for path in disk.rglob("*") if path.is_file()) - 2**17))
        run = start(sys.executable, TRAIN, *whole, "trainer.save_every=5steps").finish(2)
        assert f"free some space and type the command again with hydra.run.dir={disk}" in run.output
        assert "No space left on device" in run.output
        assert "epoch 2/2   step 46" in run.output
        assert snapshot.load(snapshot.complete(disk / "snapshots"))[0]["progress"]["step"] >= 20
    finally:
        subprocess.run(["umount", disk], check=True)


def test_the_writer_is_never_far_behind():
    writer, gate, written = snapshot.Writer(waiting=2), threading.Event(), []

    def write(number):
        gate.wait()
        written.append(number)

    writer.put(write, 0)
    writer.put(write, 1)  # training goes on
    threading.Timer(0.2, gate.set).start()
    writer.put(write, 2)  # waits for the first
    assert written[0] == 0
    writer.drain()
    assert written == [0, 1, 2]


def test_a_snapshot_that_would_run_code_is_not_loaded(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/harm",)

    torch.save(Evil(), tmp_path / "step_00000001.pt")
    with pytest.raises(Refusal):
        snapshot.load([tmp_path / "step_00000001.pt"])
    assert not (tmp_path / "harm").exists()


def test_save_every(train):
    run = train(*SHORT, "trainer.save_every=15steps", "trainer.keep=10")
    assert [path.stem for path in snapshot.complete(run.folder / "snapshots")] == ["step_00000046", "step_00000045", "step_00000030", "step_00000015"]
    cadence = snapshot.Cadence("10min")
    assert not cadence.by_the_clock()
    cadence.last -= 600
    assert [cadence.by_the_clock(), cadence.by_the_clock()] == [True, False]


@pytest.mark.drill
@pytest.mark.skipif("LOCKSTEP_DATA" not in os.environ, reason="LOCKSTEP_DATA does not say where MNIST lies")
def test_the_mnist_preset_reaches_its_promise(start):
    run = start(*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN, "experiment=mnist_ddp").finish()
    assert events(run.folder)["test/accuracy"][-1][1] >= 0.99


def test_the_toy_preset_saves_every_ten_epochs(train):
    run = train("experiment=toy_regression")
    assert [path.stem for path in snapshot.complete(run.folder / "snapshots")] == ["step_00000640", "step_00000320"]
    assert run.epochs[-1].split("test loss ")[1].startswith("0.0")


def test_average_best_and_patience_survive_a_restart(train, tmp_path):
    judged = ["model=mlp", "scheduler=constant", "trainer.ema=0.9", "trainer.epochs=40", "trainer.patience=2", "trainer.keep=1", "optimizer.lr=0.5"]
    whole = train(*judged, "hydra.run.dir=whole")
    train(*judged, "hydra.run.dir=parts", "trainer.max_steps=30")
    parts = train(*judged, "hydra.run.dir=parts")
    assert parts.epochs[-1].split("step")[1] == whole.epochs[-1].split("step")[1]
    assert len(whole.epochs) < 40
    assert same_bits(model(tmp_path / "whole"), model(tmp_path / "parts"))
    curve = events(tmp_path / "whole")["test/accuracy"]
    best = torch.load(tmp_path / "parts" / "snapshots" / "best.pt", weights_only=True)["progress"]
    assert best["best"] == pytest.approx(max(value for _, value in curve), abs=1e-6)
    assert best["step"] == curve[-3][0]
