"""A run that chooses on a validation set, and reads its test set once, with the weights that it chose."""

import csv
import signal
import sys

import pytest

from lockstep.errors import EXIT_RESUMABLE
from lockstep.runs.record import read_run
from lockstep.runs.stats import read_samples, wilson
from support.commands import TRAIN, ema
from support.configs import composed, parts_of, record_of
from support.digits import digits
from support.event_files import scalars
from support.logged import read_rows
from support.worlds import in_world, same_bits, train_all

SMALL = ["model=linear", "trainer.epochs=2", "trainer.batch_size=256"]
LOGGED = [*SMALL, "logger=[tensorboard,console,csv]"]
# The first evaluation is the best one: the weights that are tested are not the last ones.
FIRST_IS_BEST = ["task._target_=support.models.LargestLoss"]


def steps_of(folder, tag):
    return [step for step, _ in scalars(folder).get(tag, [])]


def test_the_default_run_chooses_on_validation_and_reads_the_test_set_once(train, tmp_path):
    output, folder = train(*LOGGED, *FIRST_IS_BEST, "hydra.run.dir=run").output, tmp_path / "run"
    assert "1293 training, 144 validation and 360 test samples" in output
    assert "chosen on the test set" not in output
    run = read_run(folder)
    tested = run["test"]["metrics"]
    assert [steps_of(folder, tag) for tag in ("val/loss", "val/accuracy", "test/loss")] == [[6, 12], [6, 12], [6]]
    rows = [row for row in read_rows(folder) if row[1].startswith("test/")]
    assert rows == [(6, "test/loss", tested["loss"]), (6, "test/accuracy", tested["accuracy"])]
    assert run["test"]["step"] == run["objective"]["step"] == 6
    assert (run["objective"]["name"], run["objective"]["mode"]) == ("val/loss", "max")
    (shown,) = [line for line in output.splitlines() if line.startswith("test: ")]
    low, high = wilson(tested["accuracy"], 360)
    assert shown.startswith(f"test:       loss {tested['loss']:.4f} (")
    told = f", accuracy {tested['accuracy']:.4f} ({low:.4f} to {high:.4f}), with the weights of step 6, chosen on val"
    assert shown.endswith(told)
    samples, numbers = read_samples(folder), run["data"]["validation_numbers"].split()
    assert len(samples) == 360
    assert samples["loss"].mean() == pytest.approx(tested["loss"])
    assert samples["right"].mean() == pytest.approx(tested["accuracy"])
    assert len(numbers) == run["data"]["validation_samples"] == 144
    train("mode=predict", "resume=run", "mode.split=val", "mode.file=val.csv")
    with (tmp_path / "val.csv").open() as file:
        predicted = list(csv.DictReader(file))
    targets = digits(train=True).targets
    assert [row["index"] for row in predicted] == numbers
    assert all(int(row["truth"]) == targets[int(row["index"])] for row in predicted)


READ = [  # words, the steps of the evaluations and of the tests, and the step whose weights are tested
    (["evaluation.test=every"], [6, 12], [6, 12], 6),
    (["evaluation.test=never"], [6, 12], [], None),
    (["loader.validation=null", "monitor=auto", "trainer.batch_size=240"], [], [12], 12),
    (["evaluation.every=2"], [12], [12], 12),
    (["trainer.pause_after=1"], [6], [], None),
    (["trainer.final=train+val", "trainer.batch_size=240"], [], [12], 12),
]


def test_when_the_test_set_is_read_and_that_a_final_training_takes_all_data(tmp_path):
    folders, words = [tmp_path / str(number) for number in range(len(READ))], [*LOGGED, *FIRST_IS_BEST]
    runs = [composed(*words, *row[0], f"run_dir={at}", whole=False) for at, row in zip(folders, READ, strict=True)]
    in_world(1, train_all, runs)
    for folder, (words, val, test, tested) in zip(folders, READ, strict=True):
        run, chooses = read_run(folder), words[0] not in ("loader.validation=null", "trainer.final=train+val")
        assert (steps_of(folder, "val/loss"), steps_of(folder, "test/loss")) == (val, test), words
        assert (run["test"] or {}).get("step") == tested
        assert run["objective"]["name"] == ("val/loss" if chooses else "test/loss")
        assert (run["objective"]["best"] is None) == (not chooses)
        if tested is not None:
            number = dict(scalars(folder)["test/loss"])[tested]
            assert run["test"]["metrics"]["loss"] == pytest.approx(number, rel=1e-6)
            said = f"with the weights of step {tested}, {'chosen on val' if chooses else 'the last ones'}"
            assert words[0] == "trainer.final=train+val" or said in (folder / "train.log").read_text()
    final = (folders[-1] / "train.log").read_text()
    assert "1437 training and 360 test samples" in final
    assert "nothing is chosen, and its number is the test's alone" in final
    assert "chosen on" not in final
    assert same_bits(folders[-1], folders[2])


@pytest.mark.parametrize(("number", "more"), [(signal.SIGKILL, []), (signal.SIGTERM, ["evaluation.test=every"])])
def test_a_run_that_is_stopped_in_its_test_is_tested_when_it_is_typed_again(number, more, start, tmp_path):
    own = ["dataset._target_=support.own_data.Stopping"]
    # Transforms, so that samples are read one by one, and batches in which the ranks ask for a stop.
    own += ["loader.test_transforms=[{_target_:torch.nn.Identity}]", "evaluation.batch_size=16", *more]
    typed, folder = [sys.executable, TRAIN, *LOGGED, *FIRST_IS_BEST, "hydra.run.dir=run", *own], tmp_path / "run"
    (tmp_path / "stop").write_text(str(int(number)))
    first = start(*typed).finish(EXIT_RESUMABLE if number == signal.SIGTERM else -number)
    run, kept = read_run(folder), [folder / "model.pt", *folder.glob("snapshots/*/*")]
    assert (run["test"], run["steps"]) == (None, 12)
    if number == signal.SIGTERM:
        assert "stopped early at step 12, before the test; go on there with" in first.output
        assert run["starts"][-1]["state"] == "stopped"
    contents = [path.read_bytes() for path in kept]
    for starts in (2, 3):  # the last time all is done, and the test set is not read again
        assert "with the weights of step 6, chosen on val" in start(*typed).finish().output
        run = read_run(folder)
        assert (run["test"]["step"], len(run["starts"]), run["starts"][-1]["state"]) == (6, starts, "finished")
        assert steps_of(folder, "test/loss") == ([6, 12] if more else [6])
        assert run["test"]["metrics"]["loss"] == pytest.approx(scalars(folder)["test/loss"][0][1], rel=1e-6)
    assert [path.read_bytes() for path in kept] == contents
    assert {*kept[1:]} == {*folder.glob("snapshots/*/*")}


def test_a_run_that_is_killed_after_its_test_does_not_read_it_again(start, tmp_path):
    typed = [*LOGGED, *FIRST_IS_BEST, "callbacks=[{_target_:support.faults.FaultyCallback}]", "hydra.run.dir=run"]
    typed.append("model._target_=support.faults.FaultyModel")
    kills = [(-signal.SIGKILL, f"{place}/kill:0:1") for place in ("after_test", "evaluation")]
    for code, fault in (*kills, (0, "")):
        start(sys.executable, TRAIN, *typed, FAULT=fault).finish(code)
        assert read_run(tmp_path / "run")["test"]["step"] == 6
    assert steps_of(tmp_path / "run", "test/loss") == [6]


def test_the_jobs_of_a_sweep_share_the_split_and_folds_validate_each_sample_once(start, tmp_path):
    sweep = [sys.executable, TRAIN, "-m", *SMALL, "logger=[]"]
    assert "val/loss" in start(*sweep, "seed=0,1", "hydra.sweep.dir=seeds", *FIRST_IS_BEST).finish().output
    runs = [read_run(tmp_path / "seeds" / folder) for folder in ("seed=0", "seed=1")]
    assert len({run["data"]["validation_numbers"] for run in runs}) == 1
    for run in runs:  # the number of a job is that of the weights that it has chosen
        assert run["objective"]["best"] != run["objective"]["last"]
    start(*sweep, "loader.folds=5", "loader.fold=range(0,5)", "hydra.sweep.dir=folds", "trainer.epochs=1").finish()
    runs = [read_run(path.parent) for path in sorted((tmp_path / "folds").glob("*/run.json"))]
    numbers = [int(number) for run in runs for number in run["data"]["validation_numbers"].split()]
    assert (len(runs), sorted(numbers)) == (5, list(range(1437)))
    assert all(run["test"]["step"] == run["steps"] for run in runs)


STRATEGIES = {
    "fsdp": ["strategy=fsdp", ema(0.5)],
    "pipeline": ["strategy=pipeline", "model=mlp"],
    "virtual_ranks": ["strategy=virtual_ranks", "strategy.count=4"],
    "async_parameter_server": ["strategy=async_parameter_server"],
}


def trained_and_evaluated(pairs):
    """The test metrics of each training's best weights, by mode=evaluate."""
    found = []
    for cfg, evaluation in pairs:
        train_all([cfg])
        parts = parts_of(evaluation)
        found.append(parts.mode.work(evaluation, record_of(evaluation), parts))
    return found


def test_each_strategy_tests_the_weights_that_were_chosen(tmp_path):
    pairs = []
    for name, strategy in STRATEGIES.items():
        words, folder = [*SMALL, "trainer.precision=fp64", *strategy], tmp_path / name
        use = ["mode=evaluate", f"resume={folder}", "mode.snapshot=best", f"mode.file={folder}.json", "logger=[]"]
        evaluation = composed(*words, *use, f"run_dir={folder}-evaluation", whole=False)
        pairs.append((composed(*words, *FIRST_IS_BEST, "logger=[csv]", f"run_dir={folder}", whole=False), evaluation))
    for name, best in zip(STRATEGIES, in_world(2, trained_and_evaluated, pairs)[0], strict=True):
        folder = tmp_path / name
        run, rows = read_run(folder), {(tag, step): value for step, tag, value in read_rows(folder)}
        first = run["objective"]["step"]
        assert run["test"]["step"] == first < run["steps"], name
        assert run["objective"]["best"] == rows["val/loss", first] != rows["val/loss", run["steps"]]
        assert run["test"]["metrics"] == pytest.approx(best, rel=1e-9), name
        assert run["test"]["metrics"]["loss"] == rows["test/loss", first]
