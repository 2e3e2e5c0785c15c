"""Resuming: what the snapshot decides, what the typed config decides, and what is refused."""

import os

import pytest

from lockstep.runs.record import read_run
from lockstep.snapshots.files import list_snapshots, step_of
from support.commands import ON_TEST, ema
from support.configs import composed
from support.digits import FEW, FEW_ON_TEST
from support.run_folders import newest_snapshot, read_log
from support.worlds import distance, in_world, refusal, same_bits, train, train_all, weights

# 360 training samples in batches of 64: 6 steps an epoch.
SMALL = ["model=mlp", "logger=[]", "model.width=16", "evaluation.batch_size=360", FEW_ON_TEST]
ADAMW = ["optimizer=adamw", "scheduler=one_cycle", "model.dropout=0.2", ema(0.9)]


def runs(folder, *overrides):
    return composed(f"run_dir={folder}", *SMALL, *overrides)


def steps(folder):
    return sorted(map(step_of, list_snapshots(folder / "snapshots")))


def progress(folder):
    return newest_snapshot(folder)["progress"]


def test_what_a_model_and_an_optimizer_draw_is_the_same_after_a_resume_in_mid_epoch(tmp_path):
    own = ["logger=[]", "model=linear", "model._target_=support.models.Drawing", FEW, "trainer.epochs=2"]
    own += ["optimizer._target_=support.models.Langevin", "snapshot.every=1steps", "snapshot.keep_last=20"]
    configs, pairs = [], []
    for late, steps in ((False, (2, 8)), (True, (3, 5))):  # with `late`, step 4 is the first one that draws
        whole = tmp_path / f"{late}"
        starts = {tmp_path / f"{late}{step}": f"resume={whole}/snapshots/step_{step:08}" for step in steps}
        typed = {whole: "resume=null"} | starts
        configs += [composed(f"run_dir={at}", *own, f"+model.late={late}", resume) for at, resume in typed.items()]
        pairs += [(whole, folder) for folder in starts]
    in_world(1, train_all, configs)
    assert all(same_bits(*pair) for pair in pairs)


def test_a_run_that_paused_or_begins_at_a_snapshot_goes_on_with_the_bits_of_an_unbroken_one(tmp_path):
    """evaluation.every=2: the pause after epoch 1 evaluates, but its numbers are not those of the unbroken run."""
    words = [*ADAMW, "trainer.epochs=4", "evaluation.every=2", "evaluation.patience=9", "snapshot.every=5steps"]
    whole, paused, resumed = (tmp_path / name for name in ("whole", "paused", "resumed"))
    pauses = [runs(paused, *words, f"trainer.pause_after={epochs}") for epochs in (1, 1, 2)]
    from_a_step = runs(resumed, *words, f"resume={whole}/snapshots/step_00000020")
    configs = [*pauses, runs(whole, *words), runs(paused, *words), from_a_step]
    first, again, second, *objectives = in_world(1, train_all, configs)[0]
    assert first == again != second  # a part that was run already returns its number again
    assert objectives[0] == objectives[1] == objectives[2]
    for other in (paused, resumed):
        assert same_bits(whole, other)
        assert progress(whole) == progress(other)
    assert "resumed from" in read_log(resumed)
    assert "in the snapshot" not in read_log(resumed)  # nothing has changed


def test_an_evaluation_at_max_steps_counts_only_where_the_unbroken_run_has_it(tmp_path):
    plateau = ["scheduler=plateau", "scheduler.patience=0", "monitor=val/loss", "optimizer.lr=0.4"]
    plateau += ["evaluation.every=2", "evaluation.patience=3", "trainer.epochs=8"]
    last = ["evaluation.every=2", "trainer.epochs=3"]
    starts = [("whole", 48, plateau), ("cut", 18, plateau), ("cut", 48, plateau)]  # 18 steps are 3 epochs
    starts += [("18", 18, last), ("null", "null", last)]
    in_world(1, train_all, [runs(tmp_path / name, *words, f"trainer.max_steps={n}") for name, n, words in starts])
    assert same_bits(tmp_path / "whole", tmp_path / "cut")
    for one, other in (("whole", "cut"), ("18", "null")):
        assert progress(tmp_path / one) == progress(tmp_path / other)


def train_with_a_fast_clock(cfg, rank):
    """On this rank every interval of minutes is over at once."""
    from lockstep.snapshots.checkpointer import Checkpointer

    if os.environ["RANK"] == rank:
        Checkpointer.due_by_clock = lambda self: True
    train(cfg)


@pytest.mark.parametrize(("rank", "saved"), [("0", [1, 2, 3, 4, 5, 6]), ("1", [6])])
def test_only_rank_zeros_clock_says_when_minutes_are_over(tmp_path, rank, saved):
    minutes = ["snapshot.every=10min", "snapshot.keep_last=99", "logging.every=1", "trainer.epochs=1"]
    in_world(2, train_with_a_fast_clock, runs(tmp_path, *minutes), rank)
    assert steps(tmp_path) == saved


def test_typed_settings_of_an_optimizer_win_and_what_it_counts_goes_on(tmp_path):
    adamw, counting = tmp_path / "adamw", tmp_path / "counting"
    own = ["optimizer=sgd", "optimizer._target_=support.models.CountingSGD", "scheduler=constant", "optimizer.lr=0.01"]
    configs = []
    for folder, words, changed in (
        (adamw, ["optimizer=adamw", "scheduler=constant"], ["optimizer.lr=1e-9", "optimizer.weight_decay=0.3"]),
        (counting, own, ["optimizer.lr=0.02"]),
    ):
        configs.append(runs(folder, *words, "trainer.epochs=1"))
        configs.append(runs(folder / "again", *words, *changed, f"resume={folder}", "trainer.epochs=2"))
    in_world(1, train_all, configs)
    (group,) = newest_snapshot(adamw / "again")["groups"]
    assert (group["lr"], group["weight_decay"]) == (1e-9, 0.3)
    assert distance(weights(adamw), weights(adamw / "again")) < 1e-6  # steps of such a small lr move nothing
    assert "optimizer.lr (0.002 in the snapshot, 1e-09 now); optimizer.weight_decay (0.01" in read_log(adamw / "again")
    (group,) = newest_snapshot(counting / "again")["groups"]
    assert (group["lr"], group["steps"]) == (0.02, 12)


def one_cycle_of_torch(rate):
    schedule = f"_target_:torch.optim.lr_scheduler.OneCycleLR,max_lr:{rate},total_steps:9"
    return ["scheduler=torch", f"scheduler.schedule={{{schedule}}}"]


PLATEAU, LARGE = "scheduler=plateau", "trainer.batch_size=180"  # 2 steps an epoch, and 6 with the batch size of SMALL
TORCH = ["scheduler=torch", "scheduler.schedule={_target_:torch.optim.lr_scheduler.ExponentialLR,gamma:0.9}"]
CHANGED_SCHEDULES = [
    ([PLATEAU, LARGE], [PLATEAU]),
    ([PLATEAU], ["scheduler=cosine"]),
    (["scheduler=one_cycle"], TORCH),
    ([LARGE, *TORCH], TORCH),
    (one_cycle_of_torch(0.1), one_cycle_of_torch(0.02)),  # which keeps its rates in the groups of the optimizer
]


def test_another_schedule_or_batch_size_goes_on_at_the_runs_place(tmp_path):
    """The learning rate after the third epoch of four is that of a run that was so from the start."""
    configs, four = [], "trainer.epochs=4"
    for number, (first, second) in enumerate(CHANGED_SCHEDULES):
        run, whole = tmp_path / f"run_{number}", tmp_path / f"whole_{number}"
        configs.append(runs(run, *first, four, "trainer.pause_after=1"))
        configs += [runs(folder, *second, four, "trainer.pause_after=3") for folder in (run, whole)]
    # Stopped after 20 samples of an epoch, 20 + 128 n are never the whole steps of an epoch.
    cosine, begin, whole, parts = ["scheduler=cosine", four], *(tmp_path / name for name in ("begin", "whole", "parts"))
    configs.append(runs(begin, *cosine, "trainer.batch_size=20", "trainer.max_steps=1"))
    for folder, pause in ((whole, "null"), (parts, "2"), (parts, "null")):
        changed = [f"resume={begin}", "trainer.batch_size=128", f"trainer.pause_after={pause}"]
        configs.append(runs(folder, *cosine, *changed))
    in_world(1, train_all, configs)
    for number, case in enumerate(CHANGED_SCHEDULES):
        folders = (tmp_path / f"{name}_{number}" for name in ("run", "whole"))
        rates = [float(newest_snapshot(folder)["groups"][0]["lr"]) for folder in folders]
        assert rates[0] == pytest.approx(rates[1], rel=1e-6), case
        assert rates[0] > 1e-4
    assert same_bits(whole, parts)


def test_a_best_evaluation_counts_only_where_the_same_is_measured_again(tmp_path):
    slow, judged = ["scheduler=plateau", "scheduler.patience=0", "optimizer.lr=1e-4"], "monitor=val/loss"
    averaged, metric = tmp_path / "ema", tmp_path / "metric"
    configs = [
        runs(metric, *slow, judged, "trainer.epochs=1"),
        runs(metric, *slow, "trainer.epochs=2"),
        runs(averaged, "trainer.epochs=1", ema(0.98), "optimizer.lr=1e-9"),
        runs(averaged, "trainer.epochs=2", "optimizer.lr=1e-9"),
    ]
    in_world(1, train_all, configs)
    for folder in (metric, averaged):
        assert progress(folder)["best_step"] == read_run(folder)["objective"]["step"] == 12
        assert "the monitor or trainer.ema changed: no evaluation before step 6 is the best one" in read_log(folder)
    saved = newest_snapshot(metric)
    assert saved["progress"]["best"] == -saved["schedule"]["best"] <= 1
    assert saved["groups"][0]["lr"] == pytest.approx(1e-4)


def test_a_run_that_has_reached_its_end_trains_nothing_and_says_so(tmp_path):
    run, other, patient = tmp_path / "run", tmp_path / "other", tmp_path / "patient"
    judged = ["evaluation.patience=1", "scheduler=constant", "optimizer.lr=1e-12", "trainer.epochs=9"]
    ends = [(run, ["trainer.epochs=2"], "trainer.epochs"), (run, ["trainer.epochs=1"], "trainer.epochs")]
    ends += [(run, ["trainer.epochs=9", "trainer.max_steps=3"], "trainer.max_steps")]
    ends += [(other, ["trainer.epochs=2", "trainer.max_steps=7", f"resume={run}"], "trainer.max_steps")]
    ends += [(patient, judged, "evaluation.patience")]
    in_world(1, train_all, [runs(run, "trainer.epochs=2"), runs(patient, *judged)])
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.glob("snapshots/*/*")}
    last = (run / "model.pt").read_bytes()
    in_world(1, train_all, [runs(folder, *words) for folder, words, _ in ends])
    for folder, _, key in ends:
        said = f"nothing to train: the run is at step 12 already; type {key}=<more> to go on"
        assert said in read_log(folder)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.glob("snapshots/*/*")} == before
    assert (run / "model.pt").read_bytes() == last
    assert same_bits(run, other)  # a folder without model.pt gets one, of the snapshot's weights
    assert not steps(other)


def refused_after(first, second):
    train(first)
    return refusal(second)


def test_a_snapshot_of_another_run_is_refused_and_what_differs_is_named(tmp_path):
    first, other = tmp_path / "first", tmp_path / "other"
    differs = ["seed=1", ON_TEST, "model.width=17", "optimizer=adamw"]
    second = runs(other, f"resume={first}", "trainer.epochs=2", *differs)
    (sentence,) = in_world(1, refused_after, runs(first, "trainer.max_steps=5"), second)
    for named in (
        f"{first}/snapshots/step_00000005 does not fit this run: ",
        "seed (0 in the snapshot, 1 now)",
        "training samples (360 in the snapshot, 1437 now)",
        "training data (",
        "model.width (16 in the snapshot, 17 now)",
        "optimizer (torch.optim.SGD in the snapshot, torch.optim.AdamW now)",
        "; type the overrides that it was made with, or to start afresh hydra.run.dir=<a new folder>",
    ):
        assert named in sentence
    assert "trainer.epochs" not in sentence  # this may change
    assert not (other / "snapshots").exists()
