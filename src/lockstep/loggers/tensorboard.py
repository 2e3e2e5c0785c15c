"""TensorBoard events in the run folder. A step on the x-axis is the number of optimizer steps done."""

from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter, summary

from lockstep.config.schema import Whole
from lockstep.errors import show
from lockstep.loggers.base import Logger, RunInfo
from lockstep.runs.record import FINISHED, changes_no_number


class TensorBoardLogger(Logger):
    """Writes event files to the run folder. A resumed run begins a file, which hides what came after its snapshot.
    images: samples that an evaluation shows; 0: no images of it."""

    def __init__(self, images: Whole) -> None:
        self.writer: Any = None  # a SummaryWriter, from the start on

    def start(self, info: RunInfo) -> None:
        folder, step = info.run.config.run_dir, info.run.progress.step
        for file in Path(folder).glob("events.out.tfevents.*") if step == 0 else ():  # of a run that begins anew
            file.unlink()
        is_new = not any(Path(folder).glob("events.out.tfevents.*"))
        self.writer = SummaryWriter(folder, purge_step=None if is_new else step + 1)
        if is_new:  # TensorBoard keeps the first hyperparameters that it reads of a run
            metrics = [*info.run.task.better, *info.run.config.evaluation.metrics]
            charts = {name: ("Multiline", [f"^(train|val|test)/{name}$"]) for name in metrics}
            self.writer.add_custom_scalars({"results": charts | {"best so far": ("Multiline", ["^best/.*$"])}})
            facts = info.facts
            values = {**facts["options"], **facts["config"], "world_size": facts["start"]["world_size"]}
            # Those by which runs are compared. Without null, for which TensorBoard would show all of a key as text.
            hyperparameters = {
                key: value if type(value) in (int, float, str) else show(value)
                for key, value in values.items()
                if value is not None and not changes_no_number(key) and not key.endswith(("._target_", "._partial_"))
            }
            self._write(summary.hparams(hyperparameters, {})[1], 0)  # [0]: the columns of all runs

    def log(self, metrics: dict[str, float], step: int) -> None:
        """All tags share one event: one for each takes several times as long."""
        self._write(Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]), step)

    def image(self, tag: str, image: Tensor, step: int) -> None:
        self._write(summary.image(tag, image, dataformats="CHW"), step)

    def end(self, info: RunInfo, state: str) -> None:
        if state == FINISHED:
            self._write(summary.hparams({}, {})[2], info.run.progress.step)  # so the HParams table shows it

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def _write(self, written: Summary, step: int) -> None:
        self.writer.file_writer.add_summary(written, step)
        self.writer.flush()
