"""What the console shows of a run: lines, and on a terminal a progress bar."""

import logging
import os
import shlex
import termios
from dataclasses import replace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.cli import with_overrides_of_run
from lockstep.config.record import RECORD
from lockstep.loggers.console import ConsoleLogger, ProgressBarLogger
from support.logged import epoch, run_info


def test_the_console_shows_one_line_an_epoch(caplog, tmp_path):
    caplog.set_level(logging.INFO)
    console = ConsoleLogger()
    console.on_fit_start(run_info(tmp_path, world_size=3))
    console.on_epoch_end(epoch(1))
    console.on_epoch_end(replace(epoch(2), best={"accuracy": 0.875}, best_step=2))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model_best.pt").touch()
    console.on_test({"loss": 0.5, "accuracy": 0.75}, 2, is_logged=False)
    console.on_fit_end(tmp_path / "run", {"loss": 0.25, "accuracy": 0.96875})
    assert [record.getMessage() for record in caplog.records] == [
        "1293 training, 144 validation and 360 test samples; batches of 64 samples, 21 or 22 for each of 3 ranks",
        "epoch 1/2   step 2   train loss 1.0000 accuracy 0.5000   val loss 2.0000 accuracy 0.2500   1234 samples/s",
        "epoch 2/2   step 4   train loss 0.5000 accuracy 0.5000   val loss 1.0000 accuracy 0.2500   1234 samples/s",
        "finished: val loss 0.2500, accuracy 0.9688",
        "test:       loss 0.5000, accuracy 0.7500, with the weights of step 2, chosen on val",
        f"run folder: {tmp_path / 'run'}",
        "best:       val accuracy 0.8750 at step 2, in model_best.pt; mode.snapshot=best takes its weights",
        f"evaluate:   python src/train.py mode=evaluate resume={tmp_path / 'run'}",
        f"table:      python src/runs.py table {tmp_path}",
        f"train on:   the same command with resume={tmp_path / 'run'} trainer.epochs=4",
    ]


@pytest.mark.parametrize("folder", ["1_optimizer.lr=0.01", "it's", 'a "b" c', "a\\b", "plain/1.5"])
def test_the_words_at_the_end_can_be_typed(caplog, tmp_path, folder):
    """A sweep's folders have = in their names."""
    caplog.set_level(logging.INFO)
    console = ConsoleLogger()
    console.on_fit_start(run_info(tmp_path))
    console.on_epoch_end(epoch(2))
    (tmp_path / folder / RECORD).mkdir(parents=True)
    (tmp_path / folder / RECORD / "overrides.yaml").write_text("[]")
    console.on_fit_end(tmp_path / folder, {"loss": 0.25})
    said = [line.partition(":")[2] for line in caplog.messages if line.startswith(("evaluate:", "train on:"))]
    for line in said:
        (word,) = [word for word in shlex.split(line) if word.startswith("resume=")]
        assert OverridesParser.create().parse_override(word).value() == str(tmp_path / folder)
    found = with_overrides_of_run(shlex.split(said[0])[2:])
    (log_folder,) = [word for word in found if word.startswith("hydra.run.dir=")]
    assert OverridesParser.create().parse_override(log_folder).value() == str(tmp_path / folder / "evaluate")


@pytest.mark.parametrize(
    ("world_size", "batch_size", "end"), [(1, 64, "64 samples"), (2, 64, "64 samples, 32 for each of 2 ranks")]
)
def test_the_console_shows_the_share_of_a_rank(caplog, tmp_path, world_size, batch_size, end):
    caplog.set_level(logging.INFO)
    ConsoleLogger().on_fit_start(run_info(tmp_path, 0, world_size, batch_size))
    assert caplog.records[0].getMessage().endswith(f"batches of {end}")


def test_no_progress_bar_without_a_terminal(capfd):
    bar = ProgressBarLogger()
    bar.on_epoch_start(1, 2, 100, 0)
    bar.on_step(1, 100)
    bar.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("columns", [50, 80])
def test_the_progress_bar_on_a_terminal_counts_samples_and_disappears(monkeypatch, columns):
    reading, writing = os.openpty()
    termios.tcsetwinsize(writing, (24, columns))
    with os.fdopen(reading, "rb", buffering=0) as screen, os.fdopen(writing, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        bar = ProgressBarLogger()
        bar.on_epoch_start(2, 5, 100, 25)  # resumed in mid-epoch
        bar.log_metrics({"train/running_loss": 0.125}, 1)
        bar.log_metrics({"train/lr": 0.1}, 1)
        bar.on_step(1, 5)
        bar._bar.refresh()
        shown = read_until(screen, "loss=0.1250")  # a terminal may hand over the first part of a line alone
        bar.on_step(2, 70)  # the epoch's last samples: the bar goes before the evaluation starts
        cleared = read_until(screen, " " * 20)
    for part in ("epoch 2/5:  25%", "30/100, loss=0.1250", *(["<00:", " samples/s]"] if columns == 80 else [])):
        assert part in shown
    assert cleared.split("\r")[-1].strip() == ""


def test_a_log_line_takes_the_place_of_the_progress_bar(monkeypatch):
    reading, writing = os.openpty()
    termios.tcsetwinsize(writing, (24, 80))
    with os.fdopen(reading, "rb", buffering=0) as screen, os.fdopen(writing, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        console = logging.StreamHandler(terminal)
        monkeypatch.setattr(logging.getLogger(), "handlers", [console])
        bar = ProgressBarLogger()
        bar.on_epoch_start(1, 5, 100, 0)
        logging.getLogger("lockstep").warning("rank 1 is slow")
        shown = read_until(screen, "rank 1 is slow")
        bar.close()
        assert console.filters == []
    lines = shown.partition("rank 1 is slow")[0].split("\r")
    assert "0/100" in shown
    assert lines[-1] == ""
    assert lines[-2].strip() == ""


def read_until(screen, text):
    """What the terminal shows, up to `text` and what came with it. Blocks without it, until pytest's timeout."""
    shown = ""
    while text not in shown:
        shown += screen.read(4096).decode()
    return shown
