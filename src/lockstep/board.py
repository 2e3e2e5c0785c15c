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


def open_board(world, folder, step, config):
    """Rank 0's Board, or a follower's silence with the same methods. step: where the curves go on; config: YAML text."""
    return Board(folder, step, config) if world.leads else Silence()


class Silence:
    """A board nobody looks at."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class Board:
    """Writes TensorBoard events to the run folder. The x-axis is always the number of optimizer steps done."""

    def __init__(self, folder, step, config):
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        self.folder, self.tqdm, self.bar = Path(folder), tqdm, None
        # Points a killed life wrote after the snapshot it left are taken back: one curve, no step twice.
        self.writer = SummaryWriter(folder, purge_step=step + 1 if step else None)
        if not step:
            self.writer.add_text("config", f"```yaml\n{config}```", 0)

    def welcome(self, ranks, train_samples, test_samples, batch_size):
        log.info("%d training and %d test samples; batches of %d samples over %d rank%s, %s a rank", train_samples,
                 test_samples, batch_size, ranks, "s" * (ranks > 1), f"{batch_size / ranks:g}")  # fmt: skip

    def start_epoch(self, epoch, epochs, samples, done):
        """A progress bar over the epoch's samples, where a terminal watches."""
        self.title = f"epoch {epoch}/{epochs}"
        self.bar = self.tqdm(total=samples, initial=done, desc=self.title, unit=" samples", leave=False, disable=None)
        self.clock, self.counted = time.perf_counter(), 0

    def advance(self, samples):
        self.bar.update(samples)
        self.counted += samples

    def running(self, step, means, lr):
        """Within the epoch: the loss since this was last called, and the learning rate."""
        self.bar.set_postfix(loss=f"{means['loss']:.4f}", refresh=False)
        self.post(step, {"train/running_loss": means["loss"], "train/lr": lr})

    def end_training(self):
        self.speed = self.counted / (time.perf_counter() - self.clock)
        self.bar.close()

    def end_epoch(self, step, means):
        """means: {"train": {"loss": ...}, "test": {...}}, each over all ranks; an empty group was not measured."""
        self.post(step, {f"{group}/{name}": value for group, values in means.items() for name, value in values.items()})
        self.post(step, {"speed/samples_per_s": self.speed})
        self._guarded(self.writer.flush)
        line = "   ".join(" ".join([group, *(f"{name} {value:.4f}" for name, value in values.items())]) for group, values in means.items() if values)
        log.info("%s   step %d   %s   %.0f samples/s", self.title, step, line, self.speed)

    def post(self, step, values):
        """values: {tag: number}."""
        self._guarded(lambda: [self.writer.add_scalar(tag, value, step) for tag, value in values.items()])

    def farewell(self, tested):
        self.close()
        log.info("finished: test %s", ", ".join(f"{name} {value:.4f}" for name, value in tested.items()))
        log.info("run folder: %s", self.folder)
        log.info("curves:     tensorboard --logdir %s", self.folder)

    def close(self):
        if self.bar is not None:
            self.bar.close()
        self._guarded(self.writer.close)

    def _guarded(self, write):
        """A full disk must not end a training: what TensorBoard cannot write is lost, and said."""
        try:
            write()
        except OSError as error:
            log.warning("TensorBoard could not be written (%s); training goes on", error)
