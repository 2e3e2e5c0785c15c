"""One line per epoch on the console and in train.log, and a few lines at the start and the end."""

import logging
import shlex
from pathlib import Path

from lockstep.data.partition import shares_in_words
from lockstep.errors import path_value
from lockstep.loggers.base import EpochSummary, Logger, RunInfo

log = logging.getLogger(__name__)


class ConsoleLogger(Logger):
    """Writes through `logging`; `rank_logs` decides where the lines go."""

    def __init__(self) -> None:
        self._last: EpochSummary | None = None  # of this process

    def on_fit_start(self, run: RunInfo) -> None:
        self._run = run
        log.info(
            "%d training and %d test samples; batches of %d samples%s",
            run.train_samples,
            run.eval_samples,
            run.batch_size,
            shares_in_words(run.batch_size, run.world_size, run.data_parallel_size),
        )

    def on_epoch_end(self, summary: EpochSummary) -> None:
        self._last = summary
        self._log_epoch(summary)

    def _log_epoch(self, summary: EpochSummary) -> None:
        """For example: epoch 5/5   step 115   train loss 0.0180 accuracy 0.9979   test loss 0.0447   3667 samples/s"""
        columns = [f"epoch {summary.epoch}/{summary.epochs}", f"step {summary.step}"]
        for group, means in summary.metrics.items():
            numbers = [f"{name} {value:.4f}" for name, value in means.items()]
            columns.append(" ".join([group, *numbers]))
        if summary.samples_per_second is not None:
            speeds = {"samples": summary.samples_per_second} | summary.counted_per_second
            columns += [f"{speed:.0f} {name}/s" for name, speed in speeds.items()]
        log.info("%s", "   ".join(columns))

    def on_fit_end(self, run_dir: Path, metrics: dict[str, float]) -> None:
        log.info("finished: test %s", ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        log.info("run folder: %s", run_dir)
        last = self._last
        if last is None:  # a finished run was started again
            return
        if last.best_step is not None:
            self._log_best(last, run_dir)
        run = self._run
        resume = f"resume={path_value(run_dir)}"
        log.info("evaluate:   %s", shlex.join(["python", str(run.script), "mode=evaluate", resume, *run.trusted]))
        table = ["python", str(run.script.with_name("runs.py")), "table", str(run_dir.parent)]
        log.info("table:      %s", shlex.join(table))
        if last.epoch == last.epochs:
            words = shlex.join([resume, f"trainer.epochs={2 * last.epochs}"])
            log.info("train on:   the same command with %s", words)

    def _log_best(self, last: EpochSummary, run_dir: Path) -> None:
        ((name, value),) = last.best.items()
        file = "model.pt" if last.best_step == last.step else "model_best.pt"
        # It is not there if the run was resumed in another folder, and has not become better since.
        where = f", in {file}; mode.snapshot=best takes its weights" if (run_dir / file).exists() else ""
        log.info("best:       test %s %.4f at step %s%s", name, value, last.best_step, where)
