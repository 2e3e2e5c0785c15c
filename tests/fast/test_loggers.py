"""What loggers write, and what happens when one of them cannot."""

import csv
import resource

import pytest

from lockstep.loggers import base
from lockstep.loggers.base import Logger, LoggerList
from lockstep.loggers.csv_logger import CSVLogger
from lockstep.loggers.tensorboard import TensorBoardLogger
from support.event_files import scalars
from support.logged import epoch, run_info


class Recorder(Logger):
    """Notes its calls in a list that several of them share. Raises `error` if it has one."""

    def __init__(self, name, calls, error=None):
        self.name, self.calls, self.error = name, calls, error

    def _note(self, what):
        self.calls.append(f"{self.name} {what}")
        if self.error is not None:
            raise self.error

    def on_epoch_start(self, epoch, epochs, samples, samples_done):
        self._note("on_epoch_start")

    def log_metrics(self, metrics, step):
        self._note(f"log_metrics {step}")

    def on_epoch_end(self, summary):
        self._note("on_epoch_end")

    def close(self):
        self._note("close")


def test_a_logger_that_cannot_write_costs_one_warning_a_minute(caplog, monkeypatch):
    calls: list[str] = []
    full = OSError(28, "No space left on device")
    loggers = LoggerList([Recorder("broken", calls, full), Recorder("whole", calls)])
    for step in (1, 2, 3):
        loggers.log_metrics({"train/lr": 0.1}, step)
    assert calls == [f"{name} log_metrics {step}" for step in (1, 2, 3) for name in ("broken", "whole")]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == "Recorder cannot write ([Errno 28] No space left on device); training goes on"
    monkeypatch.setattr(base, "WARN_SECONDS", 0.0)
    loggers.close()
    assert len(caplog.records) == 2
    assert calls[-2:] == ["whole close", "broken close"]


def test_a_logger_with_a_bug_ends_the_run():
    with pytest.raises(ZeroDivisionError):
        LoggerList([Recorder("bug", [], ZeroDivisionError())]).log_metrics({"train/lr": 0.1}, 1)


def test_ends_reach_the_loggers_in_reverse_order():
    calls: list[str] = []
    loggers = LoggerList([Recorder("first", calls), Recorder("second", calls)])
    loggers.on_epoch_start(1, 2, 1437, 0)
    loggers.on_epoch_end(epoch(1))
    assert calls == [
        "first on_epoch_start",
        "second on_epoch_start",
        "second on_epoch_end",
        "first on_epoch_end",
    ]


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        return [(int(row["step"]), row["tag"], float(row["value"])) for row in csv.DictReader(file)]


def log_run(folder, epochs, start_step=0, closes=True):
    """What a run of `epochs` epochs of two steps sends to TensorBoard and CSV."""
    loggers = LoggerList([TensorBoardLogger(folder, images=0), CSVLogger(folder)])
    loggers.on_fit_start(run_info(folder, start_step))
    for number in epochs:
        loggers.log_metrics({"train/running_loss": 3 / number, "train/lr": 0.1 * number}, 2 * number - 1)
        loggers.on_epoch_end(epoch(number))
    if closes:
        loggers.close()


TAGS = {
    "train/running_loss",
    "train/lr",
    "speed/samples_per_s",
    "train/loss",
    "train/accuracy",
    "val/loss",
    "val/accuracy",
}


def test_tensorboard_and_csv_have_the_same_numbers(tmp_path):
    log_run(tmp_path, [1, 2])
    found = scalars(tmp_path)
    assert found.keys() == TAGS
    assert [step for step, _ in found["train/lr"]] == [1, 3]
    assert found["val/loss"] == [(2, 2.0), (4, 1.0)]
    assert found["speed/samples_per_s"] == [(2, 1234.5), (4, 1234.5)]
    points = sorted((step, tag, value) for tag, some in found.items() for step, value in some)
    assert [(step, tag) for step, tag, _ in points] == [(step, tag) for step, tag, _ in sorted(rows(tmp_path))]
    for (_, tag, in_events), (_, _, in_csv) in zip(points, sorted(rows(tmp_path)), strict=True):
        assert in_events == pytest.approx(in_csv, rel=1e-6), tag
    assert (1, "train/running_loss", 3.0) in rows(tmp_path)


def test_a_resumed_run_drops_the_points_after_its_snapshot(tmp_path):
    log_run(tmp_path, [1, 2, 3], closes=False)  # killed after epoch 3, with a snapshot of epoch 1
    log_run(tmp_path, [2, 3], start_step=2)
    steps = {"train/running_loss": [1, 3, 5], "val/loss": [2, 4, 6]}
    found = scalars(tmp_path)
    for tag, expected in steps.items():
        assert [step for step, _ in found[tag]] == expected
        assert [step for step, name, _ in rows(tmp_path) if name == tag] == expected


def test_a_fresh_run_empties_an_old_table(tmp_path):
    log_run(tmp_path, [1, 2])
    log_run(tmp_path, [1])
    assert {step for step, _, _ in rows(tmp_path)} == {1, 2}


def test_a_table_cut_off_by_a_kill_is_read_as_far_as_it_is_whole(tmp_path):
    log_run(tmp_path, [1])
    whole = rows(tmp_path)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2,test/acc")
    log_run(tmp_path, [], start_step=2)
    assert rows(tmp_path) == whole


def test_tensorboard_goes_on_when_a_full_disk_has_room_again(tmp_path):
    logger = TensorBoardLogger(tmp_path, images=0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    lost = []
    for step, room in enumerate((20, before[0], 200, before[0]), start=1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))  # bytes of a file, as on a disk without more
        try:
            logger.log_metrics({"train/lr": 0.1, "x" * 100: 1.0}, step)
        except OSError:
            lost.append(step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert lost == [1, 3]
    assert [step for step, _ in scalars(tmp_path)["train/lr"]] == [2, 4]


def test_a_table_with_bytes_that_are_no_text_loses_only_their_rows(tmp_path):
    log_run(tmp_path, [1])
    whole = rows(tmp_path)
    with (tmp_path / "metrics.csv").open("ab") as file:
        file.write(b"2,\xff\xfe\x00,x\n" + bytes(100) + b"\n" + b"2,test/long," + b"9" * 200_000 + b"\n")
    log_run(tmp_path, [], start_step=2)
    assert rows(tmp_path)[: len(whole)] == whole
