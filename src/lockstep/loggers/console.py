"""What a run shows on the console: a line for each epoch, also in train.log, and a progress bar on a terminal."""

import logging
import shlex
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.data.partition import shares_in_words
from lockstep.errors import path_value
from lockstep.loggers.base import EpochSummary, Logger, RunInfo

log = logging.getLogger(__name__)


class ConsoleLogger(Logger):
    """One line per epoch, and a few at the start and the end. `rank_logs` decides where the lines go."""

    def __init__(self) -> None:
        self._last: EpochSummary | None = None  # of this process
        self._test = ""  # the line about the test

    def on_fit_start(self, run: RunInfo) -> None:
        self._run = run
        log.info(
            "%d training%s and %d test samples; batches of %d samples%s",
            run.train_samples,
            f", {run.val_samples} validation" if run.val_samples else "",
            run.eval_samples,
            run.batch_size,
            shares_in_words(run.batch_size, run.world_size, run.data_parallel_size),
        )
        if run.is_final:
            log.info("trained on training and validation data: nothing is chosen, and its number is the test's alone")
        elif run.objective is None:
            way = "" if run.val_samples else "; type dataset.validation=0.1 to hold some data out"
            log.info("nothing is chosen: the last weights are the result%s", way)

    def on_epoch_end(self, summary: EpochSummary) -> None:
        """For example: epoch 5/5   step 115   train loss 0.0180 accuracy 0.9979   val loss 0.0447   3667 samples/s"""
        self._last = summary
        columns = [f"epoch {summary.epoch}/{summary.epochs}", f"step {summary.step}"]
        for group, means in summary.metrics.items():
            numbers = [f"{name} {value:.4f}" for name, value in means.items()]
            columns.append(" ".join([group, *numbers]))
        if summary.samples_per_second is not None:
            speeds = {"samples": summary.samples_per_second} | summary.counted_per_second
            columns += [f"{speed:.0f} {name}/s" for name, speed in speeds.items()]
        log.info("%s", "   ".join(columns))

    def on_test(self, metrics: dict[str, float], step: int, is_logged: bool) -> None:
        chosen = ", the last ones" if self._run.objective is None else ", chosen on val"
        self._test = f"{_in_words(metrics)}, with the weights of step {step}{chosen}"

    def on_fit_end(self, run_dir: Path, metrics: dict[str, float]) -> None:
        log.info("finished: %s", f"val {_in_words(metrics)}" if metrics else "nothing was evaluated on the way")
        if self._test:
            log.info("test:       %s", self._test)
        log.info("run folder: %s", run_dir)
        last = self._last
        if last is None:  # a finished run was started again
            return
        if last.best_step is not None:
            ((name, value),) = last.best.items()
            file = "model.pt" if last.best_step == last.step else "model_best.pt"
            # It is not there if the run was resumed in another folder, and has not become better since.
            where = f", in {file}; mode.snapshot=best takes its weights" if (run_dir / file).exists() else ""
            log.info("best:       val %s %.4f at step %s%s", name, value, last.best_step, where)
        run = self._run
        resume = f"resume={path_value(run_dir)}"
        log.info("evaluate:   %s", shlex.join(["python", str(run.script), "mode=evaluate", resume, *run.flags]))
        table = ["python", str(run.script.with_name("runs.py")), "table", str(run_dir.parent)]
        log.info("table:      %s", shlex.join(table))
        if last.epoch == last.epochs:
            words = shlex.join([resume, f"trainer.epochs={2 * last.epochs}"])
            log.info("train on:   the same command with %s", words)


def _in_words(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


class ProgressBarLogger(Logger):
    """A tqdm bar on stderr over the samples of an epoch, with the running loss. It disappears when the training of the
    epoch ends.

    A log line takes the bar's place, and the bar comes back below it with the next step.
    """

    def __init__(self) -> None:
        from tqdm import tqdm  # not needed by logger=[console]

        # tqdm's own lock adds a semaphore for several processes, which Python calls leaked when a rank exits.
        tqdm.set_lock(threading.RLock())
        self._bar: tqdm[Any] | None = None
        self._samples_left = 0

    def on_epoch_start(self, epoch: int, epochs: int, samples: int, samples_done: int) -> None:
        self._samples_left = samples - samples_done
        from tqdm import tqdm

        self._bar = tqdm(
            total=samples,
            initial=samples_done,
            desc=f"epoch {epoch}/{epochs}",
            unit=" samples",
            leave=False,
            # The loss is to be seen on 50 columns, too.
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}, {rate_fmt}]",
            disable=None,  # on if stderr is a terminal
        )
        for handler in _console_handlers():
            handler.addFilter(self._clear_line)

    def on_step(self, step: int, samples: int) -> None:
        if self._bar is not None:
            self._bar.update(samples)
            self._samples_left -= samples
            if self._samples_left <= 0:
                self.close()  # not during the evaluation, which may take long

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        loss = metrics.get("train/running_loss")
        if self._bar is not None and loss is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)

    def on_epoch_end(self, summary: EpochSummary) -> None:
        self.close()  # an epoch that trainer.max_steps ends leaves samples over

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            for handler in _console_handlers():
                handler.removeFilter(self._clear_line)

    def _clear_line(self, record: logging.LogRecord) -> bool:
        """Called before a log line is written."""
        if self._bar is not None and not self._bar.disable:
            self._bar.clear()
        return True


def _console_handlers() -> list[logging.Handler]:
    streams = (sys.stdout, sys.stderr)
    return [handler for handler in logging.getLogger().handlers if getattr(handler, "stream", None) in streams]
