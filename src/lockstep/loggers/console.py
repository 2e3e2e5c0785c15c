"""What a run shows on the console: a line for each epoch, also in train.log, and a progress bar on a terminal."""

import logging
import shlex
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from lockstep.loggers.base import EpochSummary, Logger, RunInfo
from lockstep.runs.record import FINISHED, PAUSED
from lockstep.runs.stats import over_samples

log = logging.getLogger(__name__)


class ConsoleLogger(Logger):
    """One line per epoch, and a few at the start and the end. `rank_logs` decides where the lines go."""

    def start(self, run: RunInfo) -> None:
        share, rest = divmod(run.batch_size, run.data_parallel_size)
        more = f" or {share + 1}" if rest else ""
        held_out = f", {run.val_samples} validation" if run.val_samples else ""
        shares = "" if run.world_size == 1 else f", {share}{more} for each of {run.world_size} ranks"
        sets = f"{run.train_samples} training{held_out} and {run.test_samples} test samples"
        log.info("%s; batches of %d samples%s", sets, run.batch_size, shares)
        if run.is_final:
            log.info("trained on training and validation data: nothing is chosen, and its number is the test's alone")
        elif run.objective is None:
            way = "" if run.val_samples else "; type loader.validation=0.1 to hold some data out"
            log.info("nothing is chosen: the last weights are the result%s", way)

    def epoch(self, summary: EpochSummary) -> None:
        """For example: epoch 5/5   step 115   train loss 0.0180 accuracy 0.9979   val loss 0.0447   3667 samples/s"""
        columns = [f"epoch {summary.epoch}/{summary.epochs}", f"step {summary.step}"]
        for group, means in summary.metrics.items():
            columns.append(" ".join([group, *(f"{name} {value:.4f}" for name, value in means.items())]))
        speeds = {} if summary.samples_per_second is None else {"samples": summary.samples_per_second}
        columns += [f"{speed:.0f} {name}/s" for name, speed in (speeds | summary.counted_per_second).items()]
        log.info("%s", "   ".join(columns))

    def end(self, run: RunInfo, state: str) -> None:
        if state not in (FINISHED, PAUSED):
            return
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in run.last.items())
        log.info("%s: %s", state, f"val {numbers}" if numbers else "nothing was evaluated on the way")
        if run.best_step not in (None, run.steps):
            log.info("best:       %s %.4f at step %d", run.objective, run.best, run.best_step)
        if run.test is not None:
            chosen = ", the last ones" if run.objective is None else ", chosen on val"
            log.info("test:       %s, with the weights of step %d%s", of_test(run.test), run.test["step"], chosen)
        if run.sweep is None:
            log.info("run folder: %s", run.run_dir)
            log.info("evaluate:   %s", run.evaluate)
            log.info("curves:     tensorboard --logdir %s", shlex.quote(str(run.run_dir)))


def of_test(test: Mapping[str, Any]) -> str:
    """The numbers of a test with intervals of 95 % for new samples: loss 0.1, accuracy 0.9639 (0.9394 to 0.9787)."""
    parts = []
    for name, value in test["metrics"].items():
        found = over_samples(name, value, test.get("errors", {}).get(name), test.get("samples"))
        parts.append(f"{name} {value:.4f}" + ("" if found is None else " ({:.4f} to {:.4f})".format(*found)))
    return ", ".join(parts)


class ProgressBarLogger(Logger):
    """A tqdm bar on stderr over the samples of an epoch, with the running loss. It moves every `logging.every` steps,
    and is gone at the epoch's end. A log line takes its place, and it comes back below."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.stack = ExitStack()

    def start(self, run: RunInfo) -> None:
        self.run, self.epochs_done = run, (run.start_step * run.batch_size) // max(1, run.train_samples)
        self.began = run.start_step, run.samples_done  # where the bar's epoch begins, and what is done of it then
        if sys.stderr.isatty():
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            # tqdm's own lock adds a semaphore for several processes, which Python calls leaked when a rank exits.
            tqdm.set_lock(threading.RLock())
            self.stack.enter_context(logging_redirect_tqdm())

    def log(self, metrics: dict[str, float], step: int) -> None:
        loss = metrics.get("train/running_loss")
        if loss is None or not sys.stderr.isatty():
            return
        if self.bar is None:
            from tqdm import tqdm

            self.bar = tqdm(
                total=self.run.train_samples,
                desc=f"epoch {self.epochs_done + 1}/{self.run.epochs}",
                unit=" samples",
                leave=False,
                initial=self.began[1],
                # The loss is to be seen on 50 columns, too.
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}, {rate_fmt}]",
            )
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        done = self.began[1] + (step - self.began[0]) * self.run.batch_size
        self.bar.update(min(done, self.run.train_samples) - self.bar.n)

    def epoch(self, summary: EpochSummary) -> None:
        self.epochs_done, self.began = summary.epoch, (summary.step, 0)
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.stack.close()
