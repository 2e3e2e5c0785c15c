"""Stop anywhere, go on anywhere: what a run leaves, and that a resumed one ends where the unbroken one ends."""

import json
import os
import signal
import sys

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
    wait_for(lambda: list(tmp_path.glob("outputs/*/*/snapshots/step_*.json")), "snapshot")
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
    wait_for(lambda: list(tmp_path.glob("run/snapshots/step_*.json")), "snapshot")
    ranks = [pid for pid in children(run.process.pid) if b"spawn_main" in cmdline(pid)]
    os.kill(run.process.pid if who == "parent" else ranks[-1], number)
    run.finish(75)
    newest = snapshot.complete(tmp_path / "run" / "snapshots")[0]
    step = json.loads(newest.with_suffix(".json").read_text())["step"]
    assert f"stopped early at step {step}; go on there with hydra.run.dir={tmp_path}/run" in run.output
    assert not [pid for pid in ranks if os.path.exists(f"/proc/{pid}")]


@pytest.mark.parametrize("launch", ["spawn", "torchrun"])
def test_killing_the_launcher_leaves_no_orphan(start, tmp_path, launch):
    run = start(sys.executable, TRAIN, *SLOW, "trainer.epochs=200", f"launch={launch}", "hydra.run.dir=run")
    wait_for(lambda: list(tmp_path.glob("run/snapshots/step_*.json")), "snapshot")
    ranks = [pid for pid in children(run.process.pid) if b"spawn_main" in cmdline(pid)]
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
    third.with_suffix(".json").unlink()  # half-written
    state, path = snapshot.load(snapshot.complete(tmp_path))
    assert (state["step"], path) == (2, fourth)
    assert caplog.text.count("damaged") == 2
    fourth.write_bytes(b"")
    with pytest.raises(Refusal, match="none of the 3 snapshots"):
        snapshot.load(snapshot.complete(tmp_path))


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
