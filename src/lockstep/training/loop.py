"""The training of a run, from its first epoch to its last evaluation. It is the same for any number of processes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from lockstep.failures.record import heartbeat
from lockstep.loggers.base import EpochSummary, Loggers, RunInfo
from lockstep.runs.record import FINISHED, PAUSED
from lockstep.training.evaluate import Evaluator
from lockstep.training.exchange import Exchange
from lockstep.training.nonfinite import require_finite
from lockstep.training.run import Run

if TYPE_CHECKING:
    from lockstep.snapshots.checkpointer import Checkpointer


def fit(
    run: Run,
    evaluators: Sequence[Evaluator],
    tester: Evaluator | None,
    snapshots: "Checkpointer",
    loggers: Loggers,
    info: RunInfo,
) -> float | None:
    """Train epoch by epoch, evaluate, save; test once, with the weights that were chosen. Returns what was monitored of
    them, None if nothing chooses. tester: None: the test set stays shut. info: what the loggers have got."""
    exchange = Exchange(run, loggers, snapshots, delayed=run.world.device.type == "cuda")
    batches, evaluated = run.loaders.train.batches(run.progress), dict[str, dict[str, float]]()
    progress, name = run.progress, (run.objective or "").removeprefix("val/")
    run.clock.start(run.clock.before, progress.step)
    for callback in run.callbacks:
        callback.on_fit_start(run, loggers)
    while not run.finished:
        begin_epoch(run, exchange)
        for batch in islice(batches, run.steps_left):
            run.step(batch)
            progress.advance(batch)
            for callback in run.callbacks:
                callback.on_step_end(run)
            if progress.step >= exchange.due and exchange():
                break
        summary = end_epoch(run, exchange)
        if run.finished or run.evaluates_each_time:
            evaluated = {each.name: each(snapshots.stop_after_step) for each in evaluators}
            summary.metrics.update(evaluated)
            if run.objective is not None and run.update_best(evaluated["val"][name]):
                snapshots.save("best")
            if progress.best is not None:
                summary.metrics["best"] = {name: progress.best}
        loggers.epoch(summary)
        snapshots.after_epoch()
        for callback in run.callbacks:
            callback.on_epoch_end(run)
    if not evaluated:  # nothing is evaluated at each epoch, or a finished run was started again: all is logged
        evaluated = {each.name: each(snapshots.stop) for each in evaluators}
    heartbeat.enter("export")
    snapshots.export()
    is_paused, result = run.reached_limit == "trainer.pause_after", None
    if tester is not None and not is_paused:  # the test set is read once
        chosen, is_logged = progress.step if progress.best_step is None else progress.best_step, True
        if (earlier := info.facts["test"]) is not None and earlier["step"] == chosen:
            result = earlier
        elif chosen == progress.step and "test" in evaluated:
            result = {"step": chosen, "metrics": evaluated["test"], **tester.facts}
        else:
            is_logged, chosen = "test" in evaluated, snapshots.take_best()
            result = {"step": chosen, "metrics": tester(snapshots.stop_before_test, chosen), **tester.facts}
        loggers.test(result, is_logged)
    for callback in run.callbacks:
        callback.on_fit_end(run)
    last = {} if run.objective is None else evaluated["val"]
    loggers.end(replace(info, last=last, test=result), PAUSED if is_paused else FINISHED)
    return progress.best if progress.best is not None else last.get(name)


def begin_epoch(run: Run, exchange: Exchange) -> None:
    """Before the first step of an epoch, or of the rest of one."""
    progress = run.progress
    heartbeat.enter("train", run.samples_of_batch, progress.epoch + 1)
    progress.evaluation_pending = False
    run.strategy.module.train()
    if progress.samples == 0:
        run.meter.clear()
    exchange.begin_epoch()


def end_epoch(run: Run, exchange: Exchange) -> EpochSummary:
    """After the last step of an epoch, or of the run."""
    run.step.synchronise()
    exchange.drain()
    totals, step = run.world.all_reduce_sum(run.meter.flush().clone()).tolist(), run.progress.step
    means, speed, speeds = run.meter.means(totals), exchange.samples_per_second(), dict[str, float]()
    require_finite(run, totals[0])
    if speed is not None:
        of_each = run.step.targets_per_sample or totals[len(run.meter.names)] / run.progress.samples
        speeds = {"samples": speed} | ({run.task.counts: speed * of_each} if run.task.counts != "samples" else {})
    run.end_epoch()
    return EpochSummary(
        epoch=run.progress.epoch + (run.progress.samples > 0),
        epochs=run.config.trainer.epochs,
        step=step,
        metrics={"train": means} if means else {},  # all updates may have been left out
        speeds=speeds,
    )
