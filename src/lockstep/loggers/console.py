"""What a run shows on the console: a line for each epoch, also in train.log, and a progress bar on a terminal."""

import logging
import shlex
import threading
from contextlib import ExitStack

from lockstep.errors import path_value
from lockstep.loggers.base import EpochSummary, Logger, RunInfo
from lockstep.runs.record import FINISHED, PAUSED
from lockstep.runs.stats import over_samples

log = logging.getLogger(__name__)


class ConsoleLogger(Logger):
    """One line per epoch, and a few at the start and the end. `RankLogs` decides where the lines go."""

    def start(self, info: RunInfo) -> None:
        run, loaders = info.run, info.run.loaders
        held_out = "" if loaders.val is None else f", {len(loaders.val.reader)} validation"
        sets = f"{len(loaders.train)} training{held_out} and {len(loaders.test.reader)} test samples"
        log.info("%s; batches of %d samples", sets, loaders.train.batch_size)
        if run.config.trainer.final is not None:
            log.info("trained on training and validation data: nothing is chosen, and its number is the test's alone")
        elif run.objective is None:
            advice = "" if held_out else "; type loader.validation=0.1 to hold some data out"
            log.info("nothing is chosen: the last weights are the result%s", advice)

    def epoch(self, summary: EpochSummary) -> None:
        """For example: epoch 5/5   step 115   train loss 0.0180 accuracy 0.9979   val loss 0.0447   3667 samples/s"""
        columns = [f"epoch {summary.epoch}/{summary.epochs}", f"step {summary.step}"]
        for group, means in summary.metrics.items():
            if group != "best":
                columns.append(" ".join([group, *(f"{name} {value:.4f}" for name, value in means.items())]))
        columns += [f"{speed:.0f} {name}/s" for name, speed in summary.speeds.items()]
        log.info("%s", "   ".join(columns))

    def end(self, info: RunInfo, state: str) -> None:
        if state not in (FINISHED, PAUSED):
            return
        run, progress, folder = info.run, info.run.progress, info.run.config.run_dir
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in info.last.items())
        log.info("%s: %s", state, f"val {numbers}" if numbers else "nothing was evaluated on the way")
        if progress.best_step not in (None, progress.step):
            log.info("best:       %s %.4f at step %d", run.objective, progress.best, progress.best_step)
        if info.test is not None:
            chosen = ", the last ones" if run.objective is None else ", chosen on val"
            errors, samples, parts = info.test.get("errors", {}), info.test.get("samples"), list[str]()
            for name, value in info.test["metrics"].items():  # with intervals of 95 % for new samples
                found = over_samples(name, value, errors.get(name), samples)
                parts.append(f"{name} {value:.4f}" + ("" if found is None else " ({:.4f} to {:.4f})".format(*found)))
            log.info("test:       %s, with the weights of step %d%s", ", ".join(parts), info.test["step"], chosen)
        if info.facts["sweep"] is None:
            script = shlex.split(info.facts["command"])[1]
            evaluate = ["python", script, "mode=evaluate", f"resume={path_value(folder)}", *info.facts["flags"]]
            log.info("run folder: %s", folder)
            log.info("evaluate:   %s", shlex.join(evaluate))
            log.info("curves:     tensorboard --logdir %s", shlex.quote(folder))


class ProgressBarLogger(Logger):
    """A tqdm bar over the samples of an epoch, with the running loss, where stderr is a terminal. It moves every
    `logging.every` steps; log lines stand above it."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def start(self, info: RunInfo) -> None:
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        # tqdm's own lock adds a semaphore for several processes, which Python calls leaked when a rank exits.
        tqdm.set_lock(threading.RLock())
        self.run = info.run
        self.bar = tqdm(total=len(self.run.loaders.train), unit=" samples", leave=False, disable=None)
        self.stack.callback(self.bar.close)
        if not self.bar.disable:
            self.stack.enter_context(logging_redirect_tqdm())

    def log(self, metrics: dict[str, float], step: int) -> None:
        if "train/running_loss" in metrics and not self.bar.disable:
            progress, epochs = self.run.progress, self.run.config.trainer.epochs
            self.bar.n = progress.samples
            self.bar.set_description(f"epoch {progress.epoch + 1}/{epochs}", refresh=False)
            self.bar.set_postfix(loss=f"{metrics['train/running_loss']:.4f}")  # draws it

    def epoch(self, summary: EpochSummary) -> None:
        self.bar.reset()

    def close(self) -> None:
        self.stack.close()
