"""What TensorBoard's own backend reads from the files of several runs."""

import logging
import shlex
import time
from dataclasses import replace

import pytest

from lockstep.config.record import ConfigRecord
from lockstep.loggers.base import EpochSummary, hyperparameters
from lockstep.loggers.tensorboard import HEADER, TensorBoardLogger, last_wall_time, read_events
from support.event_files import Backend, scalars
from support.logged import run_info


def summary(number, accuracy, best):
    metrics = {"train": {"loss": 1.0, "accuracy": 0.5}, "test": {"loss": 2.0, "accuracy": accuracy}}
    return EpochSummary(number, 2, 2 * number, metrics, 100.0, {"accuracy": best})


def log_run(folder, hyperparameters, start_step=0, finishes=True, accuracies=(0.75, 0.5)):
    folder.mkdir(exist_ok=True, parents=True)
    logger = TensorBoardLogger(folder, images=0)
    logger.on_fit_start(replace(run_info(folder, start_step), hyperparameters=hyperparameters))
    for number, accuracy in enumerate(accuracies, start=1 + start_step // 2):
        logger.on_epoch_end(summary(number, accuracy, max(accuracies[:number])))
    if finishes:
        logger.on_fit_end(folder, {})
    logger.close()


def test_the_table_has_the_keys_of_all_runs_and_numbers_are_numbers(tmp_path):
    log_run(tmp_path / "a", {"optimizer.lr": 0.1, "trainer.compile": False, "model": "mlp", "model.width": 8})
    log_run(tmp_path / "sweep" / "b", {"optimizer.lr": 1, "trainer.compile": True, "model": "linear"}, finishes=False)
    backend = Backend(tmp_path)
    columns = {info["name"]: (info["type"].removeprefix("DATA_TYPE_"), info["differs"]) for info in backend.columns()}
    assert columns == {
        "optimizer.lr": ("FLOAT64", True),
        "trainer.compile": ("BOOL", True),
        "model": ("STRING", True),
        "model.width": ("FLOAT64", False),
    }
    rows = backend.rows()
    assert rows.keys() == {"a", "sweep/b"}
    assert rows["a"].hyperparameters == {
        "optimizer.lr": 0.1,
        "trainer.compile": False,
        "model": "mlp",
        "model.width": 8.0,
    }
    assert rows["a"].metrics["test/accuracy"] == 0.5
    assert rows["a"].metrics["best/accuracy"] == 0.75
    assert (rows["a"].status, rows["sweep/b"].status) == ("STATUS_SUCCESS", "STATUS_UNKNOWN")
    assert backend.runs() == ["a", "sweep/b"]


def test_the_command_that_shows_the_curves_is_quoted_for_the_shell(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    log_run(tmp_path / "it's a run", {})
    (typed,) = [line.partition(":")[2] for line in caplog.messages if line.startswith("curves:")]
    assert shlex.split(typed) == ["tensorboard", "--logdir", str(tmp_path / "it's a run")]


def test_a_run_that_is_started_again_shows_its_new_keys_and_keeps_one_curve(tmp_path):
    log_run(tmp_path / "a", {"trainer.epochs": 2}, finishes=False)
    log_run(tmp_path / "a", {"trainer.epochs": 3, "optimizer.lr": 0.1}, start_step=2, accuracies=(0.25, 0.125))
    backend = Backend(tmp_path)
    assert backend.rows()["a"].hyperparameters == {"trainer.epochs": 3.0, "optimizer.lr": 0.1}
    assert scalars(tmp_path / "a")["test/accuracy"] == [(2, 0.75), (4, 0.25), (6, 0.125)]


def test_a_run_that_starts_from_another_ones_snapshot_has_a_row_and_its_config(tmp_path):
    log_run(tmp_path / "b", {"optimizer.lr": 0.5}, start_step=2)
    backend = Backend(tmp_path)
    assert backend.rows()["b"].hyperparameters == {"optimizer.lr": 0.5}
    assert "seed: 0" in backend.text("b", "config/text_summary")


def test_the_relative_axis_leaves_out_the_pause_before_a_resume(tmp_path):
    log_run(tmp_path, {}, finishes=False, accuracies=(0.75,))
    before = last_wall_time(tmp_path, 2)
    (path,) = [path for path in tmp_path.glob("events.out.*") if path.name != HEADER]
    times = [event.wall_time for event in read_events(path) if event.step == 2]
    assert before == max(times)
    time.sleep(3.0)
    resumed_at = time.time()
    log_run(tmp_path, {}, start_step=2, accuracies=(0.25,))
    after = last_wall_time(tmp_path, 4)
    assert 0 <= after - before <= time.time() - resumed_at


def test_an_event_file_that_was_cut_off_is_read_as_far_as_it_is_whole(tmp_path):
    log_run(tmp_path, {})
    (path,) = [path for path in tmp_path.glob("events.out.*") if path.name != HEADER]
    assert [event.step for event in read_events(path) if event.step] == [2, 4, 4]  # two epochs and the end
    path.write_bytes(path.read_bytes()[:-10])
    assert [event.step for event in read_events(path) if event.step] == [2, 4]


def test_train_and_test_share_a_chart_and_equal_layouts_are_shown_once(tmp_path):
    for name in ("a", "b"):
        log_run(tmp_path / name, {})
    shown = Backend(tmp_path).layout()
    assert [category["title"] for category in shown] == ["results", "training", "speed"]
    charts = {chart["title"]: chart["multiline"]["tag"] for category in shown for chart in category["chart"]}
    assert charts["loss"] == ["^(train|val|test)/loss$"]
    assert charts["accuracy"] == ["^(train|val|test)/accuracy$"]
    assert sum(len(category["chart"]) for category in shown) == len(charts)


@pytest.mark.parametrize(
    ("key", "value", "column"),
    [
        ("optimizer.lr", 0.1, 0.1),
        ("trainer.compile", False, False),
        ("dataset.mean", [0.5, 1], "[0.5,1]"),
        ("my_own.key", "text", "text"),
    ],
)
def test_each_key_is_a_column_with_its_type(key, value, column):
    assert hyperparameters(record({key: value}), 2) == {key: column, "world_size": 2}


def record(shown, options=()):
    return ConfigRecord(shown, shown, dict(options), [], "", [], {})


def test_options_are_columns_and_places_and_nulls_are_not():
    flat = {"run_dir": "a", "data_dir": "b", "logger.csv.run_dir": "a", "model._target_": "x.y", "trainer.ema": None}
    flat |= {"trainer.pause_after": 3, "backend.timeout": 300, "sweep.slots": 2}
    options = {"model": "mlp", "launch": "fork", "backend": "gloo", "experiment": None, "hydra/output": "default"}
    assert hyperparameters(record(flat, options), 4) == {"model": "mlp", "world_size": 4}


def test_the_config_is_a_text_of_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, images=0)
    logger.on_fit_start(run_info(tmp_path))
    logger.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    (text,) = reader.Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "```yaml\nseed: 0\n```"


def test_a_file_whose_last_record_is_zeros_is_read_up_to_there(tmp_path):
    log_run(tmp_path, {})
    path = max(tmp_path.glob("events.out.tfevents.*"), key=lambda file: file.stat().st_size)
    whole = list(read_events(path))
    with path.open("ab") as file:
        file.write((40).to_bytes(8, "little") + bytes(4 + 40 + 4))
    assert list(read_events(path)) == whole
