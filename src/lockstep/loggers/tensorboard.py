"""TensorBoard events in the run folder. A step on the x-axis is the number of optimizer steps done."""

import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.hparams.metadata import PLUGIN_DATA_VERSION, PLUGIN_NAME, SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from lockstep.config.schema import Whole
from lockstep.loggers.base import Hyperparameter, Logger, RunInfo
from lockstep.runs.record import FINISHED
from lockstep.runs.table import is_repeat, setting_of

RETRY_SECONDS = 10.0  # after an error, before a new file is begun


class TensorBoardLogger(Logger):
    """Writes event files to `run_dir`. A resumed run begins a file, which hides what came after its snapshot.

    run_dir: folder of this run. images: samples that an evaluation shows; 0: no images of it.
    """

    def __init__(self, run_dir: str | Path, images: Whole) -> None:
        self.run_dir, self.images = str(run_dir), images
        self.writer: SummaryWriter | None = None
        self.failed_at = -RETRY_SECONDS
        self.last_step = 0

    def start(self, run: RunInfo) -> None:
        is_new = not any(Path(self.run_dir).glob("events.out.tfevents.*"))
        self.writer = SummaryWriter(self.run_dir, purge_step=None if is_new else run.start_step + 1)
        if is_new:  # TensorBoard keeps the first hyperparameters that it reads of a run
            self._write(lambda writer: writer.add_text("config", f"```yaml\n{run.config_yaml}```", 0))
            self._write(lambda writer: writer.add_custom_scalars(layout(run)))
            row = hyperparameters(run.hyperparameters, session_group(run))
            self._write(lambda writer: _add(writer, row, 0))

    def log(self, metrics: dict[str, float], step: int) -> None:
        """All tags share one event. An event for each tag takes several times as long."""
        values = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()])
        self._write(lambda writer: _add(writer, values, step))
        self.last_step = step

    def image(self, tag: str, image: Tensor, step: int) -> None:
        self._write(lambda writer: writer.add_image(tag, image, step))

    def end(self, run: RunInfo, state: str) -> None:
        if state == FINISHED:
            _, _, row = hparams({}, {})  # marks the run as finished in the HParams table
            self._write(lambda writer: _add(writer, row, self.last_step))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def _write(self, write: Callable[[SummaryWriter], object]) -> None:
        """A writer that has failed, on a full disk, stays so: after some seconds a new file goes on."""
        if self.writer is None:
            if time.monotonic() - self.failed_at < RETRY_SECONDS:
                return
            self.failed_at = time.monotonic()
            self.writer = SummaryWriter(self.run_dir)
        try:
            write(self.writer)
            self.writer.flush()
        except Exception:
            self.writer, self.failed_at = None, time.monotonic()
            raise


def _add(writer: SummaryWriter, summary: Summary, step: int) -> None:
    assert writer.file_writer is not None
    writer.file_writer.add_summary(summary, step)


def session_group(run: RunInfo) -> str:
    """The name of the row of the HParams table that a run shares with others, whose metrics TensorBoard then averages:
    jobs of one sweep that differ only in seed or fold. Empty for a run that has a row of its own."""
    words = run.facts.get("overrides", [])
    is_shared = run.sweep is not None and any(map(is_repeat, words))
    return f"{shlex.join(setting_of(words))} in {run.sweep}" if is_shared else ""


def hyperparameters(values: Mapping[str, Hyperparameter], group: str = "") -> Summary:
    """A row of the HParams table. torch's `hparams` would make numbers of truth values, and an experiment, of which
    TensorBoard then takes the columns for all runs. group: of `session_group`; what differs in one is left out."""
    start = SessionStartInfo(start_time_secs=time.time(), group_name=group)
    for key, value in values.items():
        if group and is_repeat(key):
            continue
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[key].number_value = value
        else:
            start.hparams[key].string_value = value
    content = HParamsPluginData(session_start_info=start, version=PLUGIN_DATA_VERSION).SerializeToString()
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=content))
    return Summary(value=[Summary.Value(tag=SESSION_START_INFO_TAG, metadata=metadata)])


def layout(run: RunInfo) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """{category: {chart: ("Multiline", [regular expressions of tags])}} for the tab Custom Scalars."""
    tags = {
        "results": {name: f"(train|val|test)/{name}" for name in run.metrics} | {"best so far": "best/.*"},
        "training": {
            "loss of the last steps": "train/running_loss",
            "learning rate": "train/lr",
            **({"gradient norm": "train/grad_norm"} if "trainer.max_grad_norm" in run.hyperparameters else {}),
        },
        "speed": {"samples per second": "speed/(samples|tokens)_per_s", "step time (ms)": "speed/step_ms"},
    }
    return {
        category: {chart: ("Multiline", [f"^{tag}$"]) for chart, tag in charts.items()}
        for category, charts in tags.items()
    }
