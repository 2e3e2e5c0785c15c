"""What a person sees: TensorBoard, the console line, the progress bar, the log files. Followers' boards are silent."""

import logging
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from lockstep.refusal import Refusal
from lockstep.signals import Stopped

log = logging.getLogger(__name__)

FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"


@contextmanager
def logs(folder, rank):
    """Every rank's log in folder/logs/rank<N>.log; rank 0's also in folder/train.log and, bare, on the console.

    An exception that ends the block is written to the rank's own log, whoever shows it on the console.
    """
    root, folder = logging.getLogger(), Path(folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    handlers = [logging.FileHandler(folder / "logs" / f"rank{rank}.log")]
    if rank == 0:
        handlers += [logging.FileHandler(folder / "train.log"), logging.StreamHandler(sys.stdout)]
    for handler in handlers:
        is_file = isinstance(handler, logging.FileHandler)
        handler.setFormatter(logging.Formatter(FORMAT if is_file else "%(message)s"))
    before = root.handlers, root.level
    root.handlers, root.level = handlers, logging.INFO
    try:
        yield
    except Stopped as stopped:
        log.info("%s", stopped)
        raise
    except Exception as error:
        root.handlers = [handler for handler in handlers if isinstance(handler, logging.FileHandler)]
        log.error("%s", error, exc_info=not isinstance(error, Refusal))
        raise
    finally:
        root.handlers, root.level = before
        for handler in handlers:
            handler.close()


def open_board(world, folder, run, config, log_every):
    """Rank 0's Board, or a follower's silence with the same methods. config: the composed YAML text."""
    return Board(folder, run, config, log_every) if world.leads else Follower(run, log_every)


class Follower:
    """A board nobody looks at: it only takes part in the sums that rank 0 shows."""

    def __init__(self, run, log_every):
        self.run, self.log_every = run, log_every

    def after_step(self, samples):
        if self.run.progress.step % self.log_every == 0:
            self.run.meter.means_since_last()

    def __getattr__(self, name):
        return lambda *args: None


class Board:
    """Writes TensorBoard events to the run folder. The x-axis is always the number of optimizer steps done."""

    def __init__(self, folder, run, config, log_every):
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        self.folder, self.run, self.log_every, self.tqdm, self.summary = Path(folder), run, log_every, tqdm, Summary
        # Points a killed life wrote after the snapshot it left are taken back: one curve, no step twice.
        self.writer = SummaryWriter(folder, purge_step=run.progress.step + 1 if run.progress.step else None)
        if not run.progress.step:
            self.writer.add_text("config", f"```yaml\n{config}```", 0)

    def welcome(self, ranks, readers, train_samples, test_samples):
        batch_size = self.run.recipe.batch_size
        log.info("%d training and %d test samples; batches of %d samples, %g for each of %d rank%s", train_samples, test_samples,
                 batch_size, batch_size / readers, ranks, "s" * (ranks > 1))  # fmt: skip

    def start_epoch(self, samples):
        """A progress bar over the epoch's samples, where a terminal watches."""
        progress = self.run.progress
        self.title, self.line = f"epoch {progress.epoch + 1}/{self.run.recipe.epochs}", ""
        self.bar = self.tqdm(total=samples, initial=progress.samples, desc=self.title, unit=" samples", leave=False, disable=None)
        self.clock, self.counted = time.perf_counter(), 0

    def after_step(self, samples):
        """Every `log_every` steps: the loss since the last such step, over all ranks, and the learning rate."""
        self.bar.update(samples)
        self.counted += samples
        if self.run.progress.step % self.log_every == 0:
            loss = self.run.meter.means_since_last()["loss"]
            self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self.post({"train/running_loss": loss, "train/lr": self.run.scheduler.get_last_lr()[0]})

    def end_training(self, means, figures):
        self.speed = self.counted / (time.perf_counter() - self.clock)
        self.bar.close()
        self.post({"speed/samples_per_s": self.speed, **figures})
        self._show("train", means)

    def end_evaluation(self, means):
        self._show("test", means)

    def _show(self, group, means):
        self.post({f"{group}/{name}": value for name, value in means.items()})
        self.line += "   " + " ".join([group, *(f"{name} {value:.4f}" for name, value in means.items())])

    def flush(self):
        self._guarded(self.writer.flush)

    def end_epoch(self):
        self.flush()
        log.info("%s   step %d%s   %.0f samples/s", self.title, self.run.progress.step, self.line, self.speed)

    def post(self, values):
        """values: {tag: number}, at the present step. They share one event: an event for each tag takes several times as long."""
        summary = self.summary(value=[self.summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()])
        self._guarded(lambda: self.writer.file_writer.add_summary(summary, self.run.progress.step))

    def farewell(self, tested):
        self._guarded(self.writer.close)
        log.info("finished: test %s", ", ".join(f"{name} {value:.4f}" for name, value in tested.items()))
        log.info("run folder: %s", self.folder)
        log.info("curves:     tensorboard --logdir %s", self.folder)

    def _guarded(self, write):
        """A full disk must not end a training: what TensorBoard cannot write is lost, and said."""
        try:
            write()
        except OSError as error:
            log.warning("TensorBoard could not be written (%s); training goes on", error)
