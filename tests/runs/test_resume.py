"""Resuming: what the snapshot decides, what the typed config decides, and what is refused."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.runs.record import read_run
from lockstep.snapshots.files import list_snapshots, step_of
from support.commands import ON_TEST, ema
from support.configs import composed
from support.digits import FEW, FEW_ON_TEST
from support.run_folders import newest_snapshot, read_log
from support.worlds import distance, in_world, same_bits, train, train_all, weights

# 360 training samples in batches of 64: 6 steps an epoch.
SMALL = ["model=mlp", "logger=[]", "model.width=16", "evaluation.batch_size=360", FEW_ON_TEST]


def runs(folder: Path, *overrides: str) -> Any:
    return composed(f"run_dir={folder}", *SMALL, *overrides)


def test_a_resumed_run_ends_with_the_same_bits_as_an_unbroken_one(tmp_path):
    adamw = ["optimizer=adamw", "scheduler=one_cycle", "model.dropout=0.2", "trainer.epochs=3", ema(0.9)]
    adamw += ["snapshot.every=5steps"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    start = whole / "snapshots/step_00000010"
    parts = [runs(resumed, *adamw, f"resume={start}", "trainer.pause_after=2"), runs(resumed, *adamw)]
    in_world(1, train_all, [runs(whole, *adamw), *parts])
    assert same_bits(whole, resumed)
    assert "resumed from" in read_log(resumed)
    assert "in the snapshot" not in read_log(resumed)  # nothing has changed


@pytest.mark.parametrize("late", [False, True])
def test_what_a_model_and_an_optimizer_draw_is_the_same_after_a_resume_in_mid_epoch(tmp_path, late):
    own = ["logger=[]", "model=linear", "model._target_=support.models.Drawing", f"+model.late={late}"]
    own += ["optimizer._target_=support.models.Langevin", FEW, "trainer.epochs=2"]
    own += ["snapshot.every=1steps", "snapshot.keep_last=20"]
    whole, steps = tmp_path / "whole", (2, 3, 5, 8)  # with `late`, step 4 is the first one that draws
    in_world(1, train, composed(f"run_dir={whole}", *own))
    starts = {tmp_path / str(step): f"resume={whole}/snapshots/step_{step:08}" for step in steps}
    in_world(1, train_all, [composed(f"run_dir={folder}", *own, resume) for folder, resume in starts.items()])
    assert all(same_bits(whole, folder) for folder in starts)


def test_a_run_that_paused_goes_on_with_the_bits_and_the_schedule_of_an_unbroken_one(tmp_path):
    """evaluation.every=2: the pause after epoch 1 evaluates, but its numbers are not those of the unbroken run."""
    adamw = ["optimizer=adamw", "scheduler=one_cycle", "model.dropout=0.2", "trainer.epochs=4", ema(0.9)]
    adamw += ["evaluation.every=2", "evaluation.patience=9"]
    whole, paused = tmp_path / "whole", tmp_path / "paused"
    parts = [runs(paused, *adamw, f"trainer.pause_after={epochs}") for epochs in (1, 2)]
    first, again, second = in_world(1, train_all, [parts[0], *parts])[0]
    position = newest_snapshot(paused)["progress"]
    assert (position["epoch"], position["step"], position["samples"]) == (2, 12, 0)
    assert first == again != second  # a part that was run already returns its number again
    objectives = in_world(1, train_all, [runs(whole, *adamw), runs(paused, *adamw)])[0]
    assert objectives[0] == objectives[1]
    assert same_bits(whole, paused)
    assert newest_snapshot(whole)["progress"] == newest_snapshot(paused)["progress"]


def test_an_evaluation_at_max_steps_between_two_others_does_not_count(tmp_path):
    plateau = ["scheduler=plateau", "scheduler.patience=0", "monitor=val/loss", "optimizer.lr=0.4"]
    plateau += ["evaluation.every=2", "evaluation.patience=3", "trainer.epochs=8"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    steps = [(whole, 48), (cut, 18), (cut, 48)]  # 18 steps are 3 epochs
    in_world(1, train_all, [runs(folder, *plateau, f"trainer.max_steps={count}") for folder, count in steps])
    assert newest_snapshot(whole)["progress"] == newest_snapshot(cut)["progress"]
    assert same_bits(whole, cut)


def test_an_evaluation_at_max_steps_counts_where_the_last_epoch_ends(tmp_path):
    last = ["evaluation.every=2", "trainer.epochs=3"]
    in_world(1, train_all, [runs(tmp_path / name, *last, f"trainer.max_steps={name}") for name in ("18", "null")])
    assert newest_snapshot(tmp_path / "18")["progress"] == newest_snapshot(tmp_path / "null")["progress"]


def train_with_a_fast_clock(cfg: Any, rank: str) -> None:
    """On this rank every interval of minutes is over at once."""
    from lockstep.snapshots.checkpointer import Checkpointer

    if os.environ["RANK"] == rank:
        Checkpointer.due_by_clock = lambda self: True  # type: ignore[method-assign]
    train(cfg)


def test_only_rank_zeros_clock_says_when_minutes_are_over(tmp_path):
    minutes = ["snapshot.every=10min", "snapshot.keep_last=99", "logging.every=1", "trainer.epochs=1"]
    for rank in ("0", "1"):
        in_world(2, train_with_a_fast_clock, runs(tmp_path / rank, *minutes), rank)
    steps = [sorted(map(step_of, list_snapshots(tmp_path / rank / "snapshots"))) for rank in ("0", "1")]
    assert steps == [[1, 2, 3, 4, 5, 6], [6]]


def train_on_a_slow_disk(cfg: Any) -> int:
    """The most snapshots that were in memory at once."""
    from lockstep.snapshots import checkpointer, files

    collect, write, held = checkpointer.collect, files.finish_snapshot, [0]

    def counted(*given: Any) -> Any:
        held.append(held[-1] + 1)
        return collect(*given)

    def slow(*given: Any) -> Path:
        time.sleep(0.5)
        held.append(held[-1] - 1)
        return write(*given)

    checkpointer.collect, files.finish_snapshot = counted, slow
    train(cfg)
    return max(held)


def test_training_goes_on_while_two_snapshots_at_most_wait_for_the_disk(tmp_path):
    slow = runs(tmp_path, "snapshot.every=1steps", "snapshot.keep_last=9", "trainer.epochs=1")
    assert in_world(1, train_on_a_slow_disk, slow) == [2]
    assert list(map(step_of, list_snapshots(tmp_path / "snapshots"))) == [6, 5, 4, 3, 2, 1]


def test_the_typed_optimizer_settings_win_over_the_snapshots(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    constant = ["optimizer=adamw", "scheduler=constant"]
    changed = ["optimizer.lr=1e-9", "optimizer.weight_decay=0.3", f"resume={first}", "trainer.epochs=2"]
    in_world(1, train_all, [runs(first, *constant, "trainer.epochs=1"), runs(second, *constant, *changed)])
    (group,) = newest_snapshot(second)["groups"]
    assert (group["lr"], group["weight_decay"]) == (1e-9, 0.3)
    assert distance(weights(first), weights(second)) < 1e-6  # steps of such a small lr move nothing
    log = read_log(second)
    assert "optimizer.lr (0.002 in the snapshot, 1e-09 now)" in log
    assert "optimizer.weight_decay (0.01 in the snapshot, 0.3 now)" in log


def test_what_an_optimizer_counts_in_its_groups_goes_on_with_other_settings(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    counting = ["optimizer=sgd", "optimizer._target_=support.models.CountingSGD", "scheduler=constant"]
    changed = ["optimizer.lr=0.02", f"resume={first}", "trainer.epochs=2"]
    ways = [runs(first, *counting, "optimizer.lr=0.01", "trainer.epochs=1"), runs(second, *counting, *changed)]
    in_world(1, train_all, ways)
    (group,) = newest_snapshot(second)["groups"]
    assert (group["lr"], group["steps"]) == (0.02, 12)


def last_rate(folder: Path) -> float:
    return float(newest_snapshot(folder)["groups"][0]["lr"])


PLATEAU, LARGE = "scheduler=plateau", "trainer.batch_size=180"  # 2 steps an epoch, and 6 with the batch size of SMALL
TORCH = ["scheduler=torch", "scheduler.schedule={_target_:torch.optim.lr_scheduler.ExponentialLR,gamma:0.9}"]
CHANGED_SCHEDULES = [
    ([PLATEAU, LARGE], [PLATEAU]),
    (["scheduler=cosine"], [PLATEAU]),
    ([PLATEAU], ["scheduler=cosine"]),
    ([PLATEAU], TORCH),
    (["scheduler=one_cycle"], TORCH),
    ([LARGE, "scheduler=cosine"], ["scheduler=cosine"]),
    ([LARGE, "scheduler=one_cycle"], ["scheduler=one_cycle"]),
    ([LARGE, *TORCH], TORCH),
]


def test_another_schedule_or_batch_size_goes_on_at_the_runs_place(tmp_path):
    """The learning rate after the third epoch of four is that of a run that was so from the start."""
    configs, four = [], "trainer.epochs=4"
    for number, (first, second) in enumerate(CHANGED_SCHEDULES):
        run, whole = tmp_path / f"run_{number}", tmp_path / f"whole_{number}"
        configs.append(runs(run, *first, four, "trainer.pause_after=1"))
        configs += [runs(folder, *second, four, "trainer.pause_after=3") for folder in (run, whole)]
    in_world(1, train_all, configs)
    for number, case in enumerate(CHANGED_SCHEDULES):
        rates = [last_rate(tmp_path / f"{name}_{number}") for name in ("run", "whole")]
        assert rates[0] == pytest.approx(rates[1], rel=1e-6), case
        assert rates[0] > 1e-4


def test_a_best_evaluation_counts_only_where_the_same_is_measured_again(tmp_path):
    judged = ["scheduler=plateau", "scheduler.patience=0", "monitor=val/loss"]
    averaged, metric = tmp_path / "ema", tmp_path / "metric"
    configs = [
        runs(metric, *judged, "trainer.epochs=1", "optimizer.lr=1e-4"),
        runs(metric, *judged[:2], "trainer.epochs=2", "optimizer.lr=1e-4"),
        runs(averaged, "trainer.epochs=1", ema(0.98), "optimizer.lr=1e-9"),
        runs(averaged, "trainer.epochs=2", "optimizer.lr=1e-9"),
    ]
    in_world(1, train_all, configs)
    saved = newest_snapshot(metric)
    assert saved["progress"]["best_step"] == 12
    assert saved["progress"]["best"] == saved["schedule"]["schedule"]["best"] <= 1
    assert saved["groups"][0]["lr"] == pytest.approx(1e-4)
    assert newest_snapshot(averaged)["progress"]["best_step"] == 12
    assert [read_run(folder)["objective"]["step"] for folder in (metric, averaged)] == [12, 12]
    assert "the monitor changed: the best evaluation before step 6 does not count" in read_log(metric)
    assert "trainer.ema changed: the best evaluation before step 6 does not count" in read_log(averaged)


def test_a_ddp_snapshot_with_fused_sgd_goes_on_under_fsdp(tmp_path):
    exact = ["trainer.precision=fp64", "scheduler=constant", "trainer.epochs=2"]
    ddp, fsdp = tmp_path / "ddp", tmp_path / "fsdp"
    configs = [
        runs(ddp, *exact, "snapshot.every=8steps", "optimizer.fused=true"),
        runs(fsdp, *exact, "strategy=fsdp", f"resume={ddp}/snapshots/step_00000008"),
    ]
    in_world(2, train_all, configs)
    assert distance(weights(ddp), weights(fsdp)) < 1e-12
    assert newest_snapshot(fsdp)["progress"]["step"] == 12


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    paths = [*folder.glob("snapshots/*/*"), folder / "model.pt"]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def test_a_run_that_has_reached_its_end_trains_nothing_and_says_so(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    in_world(1, train_all, [runs(run, "trainer.epochs=2")])
    before = contents(run)
    configs = [
        runs(run, "trainer.epochs=2"),
        runs(run, "trainer.epochs=1"),
        runs(run, "trainer.epochs=9", "trainer.max_steps=3"),
        runs(other, "trainer.epochs=2", "trainer.max_steps=7", f"resume={run}"),
    ]
    in_world(1, train_all, configs)
    assert contents(run) == before
    said = [line.split(" - ")[1] for line in read_log(run).splitlines() if "nothing to train" in line]
    sentence = "nothing to train: the run is at step 12 already; type {}=<more> to go on"
    assert said == [sentence.format(key) for key in ("trainer.epochs", "trainer.epochs", "trainer.max_steps")]
    assert sentence.format("trainer.max_steps") in read_log(other)
    assert same_bits(run, other)  # a folder without model.pt gets one, of the snapshot's weights
    assert not (other / "snapshots").exists()

    # A model.pt that is older than the snapshot is of an earlier step: the run was killed between the two files.
    torch.save({}, run / "model.pt")
    old = (run / "snapshots/step_00000012").stat().st_mtime - 10
    os.utime(run / "model.pt", (old, old))
    in_world(1, train_all, configs[:1])
    assert same_bits(run, other)


def test_a_run_whose_patience_has_ended_trains_nothing(tmp_path):
    run = tmp_path / "run"
    judged = ["evaluation.patience=1", "scheduler=constant", "optimizer.lr=1e-12", "trainer.epochs=9"]
    in_world(1, train_all, [runs(run, *judged), runs(run, *judged)])
    told = "nothing to train: the run is at step 12 already; type evaluation.patience=<more> to go on"
    assert read_log(run).count(told) == 1
    assert newest_snapshot(run)["progress"]["step"] == 12


def _refusal(first: Any, second: Any) -> str:
    train(first)
    with pytest.raises(ConfigError) as refused:
        train(second)
    return str(refused.value)


def test_a_snapshot_of_another_run_is_refused_and_what_differs_is_named(tmp_path):
    first, other = tmp_path / "first", tmp_path / "other"
    differs = ["seed=1", ON_TEST, "model.width=17", "optimizer=adamw"]
    second = runs(other, f"resume={first}", "trainer.epochs=2", *differs)
    (sentence,) = in_world(1, _refusal, runs(first, "trainer.max_steps=5"), second)
    assert f"{first}/snapshots/step_00000005 does not fit this run: " in sentence
    for named in (
        "seed (0 in the snapshot, 1 here)",
        "training samples (360 in the snapshot, 1437 here)",
        "training data (",
        "model.width (16 in the snapshot, 17 here)",
        "optimizer (torch.optim.SGD in the snapshot, torch.optim.AdamW here)",
    ):
        assert named in sentence
    assert "trainer.epochs" not in sentence  # this may change
    assert sentence.endswith(
        "; type the overrides that it was made with, or to start afresh hydra.run.dir=<a new folder>"
    )
    assert not (other / "snapshots").exists()
