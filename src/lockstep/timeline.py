"""Where a step's time goes: one step of many measured in parts, and torch's profiler over a few.

The loop knows nothing of it. A step is watched through what the loop is handed: the loader, whose batches tell when the loop
takes up each of their parts; the loss, which ends a forward pass; and the calls after a step.
"""

import logging
import os
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

log = logging.getLogger(__name__)

PARTS = ("data", "forward", "backward", "gradient_sync", "optimizer", "logging")


def watched(train, world, post, run_dir, every, trace_after, trace_steps):
    """`train`, a loop as conf/loop has it, that also tells where its time goes.

    One of `every` steps is measured, and `post` gets {"profile/data_ms": milliseconds, ...}. After `trace_after` steps, which
    warm up, torch's profiler records `trace_steps` steps into run_dir/trace/, on every rank.
    """
    return Timeline(train, world, post, Path(run_dir) / "trace", every, trace_after, trace_steps).train


class Timeline:
    """Has a Split or a Trace watch the steps that are due, and tells it what part of a step begins.

    A step is watched from the end of the one before it; none that begins an epoch or ends it with a smaller batch.
    """

    def __init__(self, train, world, post, folder, every, trace_after, trace_steps):
        self.loop, self.world, self.post, self.folder = train, world, post, folder
        self.every, self.trace_after, self.trace_steps = every, trace_after, trace_steps
        self.steps = self.since = 0  # of this life; since the last one measured
        self.watcher = self.unread = None

    def train(self, run, loader, after_step):
        """Calls the loop as the loop is called."""
        recipe, self.run, self.samples = run.recipe, run, len(loader)

        def loss(outputs, targets):
            answer = recipe.loss(outputs, targets)
            self.enter("backward")
            return answer

        run.recipe = replace(recipe, loss=loss)
        try:
            figures = self.loop(run, Loader(loader, self), [lambda samples: self.enter("logging"), *after_step, self.after_step])
            self.tell(wait=True)
            return figures
        finally:
            run.recipe = recipe
            if self.watcher is not None:
                self.watcher.leave()
                self.watcher = None

    def enter(self, part):
        """The time from here on is `part`'s."""
        if self.watcher is not None:
            self.watcher.enter(part)

    def after_step(self, samples):
        self.steps, self.since = self.steps + 1, self.since + 1
        if self.watcher is not None and self.watcher.end_step():
            self.unread, self.watcher = self.watcher, None
        self.tell(wait=False)
        if self.watcher is None and self.unread is None and self.ahead:
            self.watcher = self.due()
        self.enter("data")

    @property
    def ahead(self):
        """How many more steps of whole batches there are in this epoch."""
        recipe, progress = self.run.recipe, self.run.progress
        steps = (self.samples - progress.samples) // recipe.batch_size
        return steps if recipe.max_steps is None else min(steps, recipe.max_steps - progress.step)

    def due(self):
        """The watcher of the next step, or None."""
        fits = min(1 + self.trace_steps, self.samples // self.run.recipe.batch_size - 1)  # a short epoch's is traced as far as it goes
        if self.trace_after is not None and self.steps >= self.trace_after and self.ahead >= fits:
            self.trace_after = None
            return Trace(self.world.device, self.folder / f"rank{self.world.rank}.{self.run.progress.step}.pt.trace.json", self.trace_steps)
        if self.since >= self.every - 1:
            self.since = -1
            return Split(self.world.device, self.run.model)
        return None

    def tell(self, wait):
        """Post what was measured once it is known. On a GPU that may be a step later: nobody waits for it before an epoch's end."""
        figures = None if self.unread is None else self.unread.figures(wait)
        if figures is not None:
            self.post({f"profile/{part}_ms": value for part, value in figures.items()})
            self.unread = None


class Loader:
    """A loader whose batches tell the timeline when the loop takes up each of their parts, and when it has done with the last."""

    def __init__(self, loader, timeline):
        self.loader, self.timeline = loader, timeline

    def __len__(self):
        return len(self.loader)

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def epoch(self, *arguments, **options):
        for batch in self.loader.epoch(*arguments, **options):
            yield batch if self.timeline.watcher is None else batch._replace(parts=Parts(batch.parts, self.timeline.enter))


class Parts(list):
    """A batch's parts, which call `enter` as they are taken up."""

    def __init__(self, parts, enter):
        super().__init__(parts)
        self.enter = enter

    def __iter__(self):
        for part in super().__iter__():
            self.enter("forward")
            yield part
        self.enter("optimizer")


class Split:
    """One step in its parts, by the device's own clock: what it computed or waited for, and no wait for it.

    Gradient averaging is exposed from this rank's last gradient to the end of its backward pass: all before happens beside it.
    """

    def __init__(self, device, model):
        self.device, self.moments, self.last_gradient = device, [], None
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Hooks of the parameters, which a compiled net does not see: hooks of modules would have it compiled again.
        self.hooks = [parameter.register_post_accumulate_grad_hook(self._gradient) for parameter in learning]

    def _gradient(self, parameter):
        self.last_gradient = now(self.device)

    def enter(self, part):
        if self.last_gradient is not None:
            self.moments.append(("gradient_sync", self.last_gradient))
            self.last_gradient = None
        self.moments.append((part, now(self.device)))

    def end_step(self):
        """True: this was the last step to watch."""
        self.enter("over")
        self.leave()
        return True

    def leave(self):
        for hook in self.hooks:
            hook.remove()

    def figures(self, wait):
        """{part: ms, ..., "step": their sum}, or None while the device has not come to the step's end; `wait` has it come."""
        _, end = self.moments[-1]
        if isinstance(end, torch.cuda.Event):
            if wait:
                end.synchronize()
            if not end.query():
                return None
        spans = dict.fromkeys(PARTS, 0.0)
        for (part, began), (_, ended) in pairwise(self.moments):
            spans[part] += began.elapsed_time(ended) if isinstance(end, torch.cuda.Event) else 1000 * (ended - began)
        return spans | {"step": sum(spans.values())}


def now(device):
    """This moment in seconds; on a GPU a mark in its queue of work instead."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Trace:
    """torch's profiler: a step to warm up, then `steps` to record, each part of them a range. TensorBoard and Perfetto read the file."""

    def __init__(self, device, path, steps):
        from torch.profiler import ProfilerActivity, profile, schedule

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells the console of every start, and of GPUs that are not there
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self.path, self.left, self.range = path, 1 + steps, None
        self.profiler = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=steps), on_trace_ready=self._write)
        self.profiler.start()

    def enter(self, part):
        self._close()
        self.range = torch.profiler.record_function(f"lockstep: {part}")
        self.range.__enter__()

    def _close(self):
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None

    def end_step(self):
        """Whether this was the last step to watch."""
        self._close()
        self.left -= 1
        if self.left:
            self.profiler.step()
        else:
            self.leave()
        return not self.left

    def leave(self):
        """Write what was recorded."""
        self._close()
        self.profiler.stop()

    def _write(self, profiler):
        """Whole or not at all. A full disk must not end a training."""
        unfinished = self.path.with_suffix(".tmp")
        try:
            self.path.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(unfinished))
            os.replace(unfinished, self.path)
            log.info("trace: %s", self.path)
        except OSError as error:
            log.warning("no trace (%s); training goes on", error)

    def figures(self, wait):
        """None to post: the file has them."""
        return {}
