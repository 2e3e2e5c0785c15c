"""TensorBoard events in the run folder. A step on the x-axis is the number of optimizer steps done.

What TensorBoard shows of a run beside its curves, the config, a row of the HParams table and a layout of charts, is in
one small file beside them, which every start writes anew. TensorBoard keeps the first hyperparameters that it reads of
a run, and it reads files in the order of their names: so this file comes first.
"""

import logging
import os
import shlex
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.hparams.metadata import PLUGIN_DATA_VERSION, PLUGIN_NAME, SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard.summary import custom_scalars, hparams
from torch.utils.tensorboard.summary import image as image_summary
from torch.utils.tensorboard.summary import text as text_summary

from lockstep.config.schema import Whole
from lockstep.loggers.base import EpochSummary, Hyperparameter, Logger, RunInfo
from lockstep.runs.repeats import is_repeat, setting_of
from lockstep.tasks.base import ReadSample, Report

log = logging.getLogger(__name__)

HEADER = "events.out.tfevents.0.header"
VERSION = "brain.Event:2"  # in the first event of a file
DRAWING_SHARE = 0.01  # of the time: images of an evaluation are drawn after training for 100 times as long
FIRST_DRAWING = 0.1  # seconds
LENGTH = struct.Struct("<Q")  # of an event in its file
CHECKSUM_BYTES = 4  # after the length, and after the content
LARGEST_READ = 65536  # bytes; an event with images is longer, and events with numbers stand beside it

Chart = tuple[str, list[str]]


class TensorBoardLogger(Logger):
    """Writes event files to `run_dir`.

    Events of a resumed run have the times that they would have if the run had not paused: TensorBoard's relative x-axis
    shows the time that was trained.

    Torch's SummaryWriter is not used: its thread prints a traceback where the disk is full, and fails for ever. Here
    what does not fit is lost, and the file goes on when there is room.

    run_dir: folder of this run.
    images: images that an evaluation shows; 0: no images of it.
    """

    def __init__(self, run_dir: str | Path, images: Whole) -> None:
        self.run_dir, self.images = Path(run_dir), images
        self._drawings: dict[str, Callable[[], None]] = {}  # {split: draws its newest report}, if that is not done yet
        self._drawn_at, self._drawing_seconds = time.monotonic(), FIRST_DRAWING
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = self.run_dir / name  # not there before the first event
        self._purge_step: int | None = None
        self._last_step = 0
        self._pause = 0.0  # seconds in which the run was not running

    def on_fit_start(self, run: RunInfo) -> None:
        """TensorBoard is told to drop the points after the snapshot: one curve, no step twice."""
        if any(self.run_dir.glob("events.out.tfevents.*")):  # perhaps of a run that ended before its first snapshot
            last = last_wall_time(self.run_dir, run.start_step)
            self._pause = 0.0 if last is None else max(0.0, time.time() - last)
            self._purge_step = run.start_step + 1
            self._append(0)  # creates the file, which contains the purge step
        write_header(run)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """All tags share one event. An event for each tag takes several times as long."""
        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in metrics.items()]
        self._add_summary(Summary(value=values), step)

    def image(self, tag: str, image: Tensor, step: int) -> None:
        self._append(step, summary=image_summary(tag, image, dataformats="CHW"))

    def log_report(self, report: Report, sample: ReadSample, classes: Sequence[str], step: int, split: str) -> None:
        """Draw it, now or at the end of the training: most evaluations of a very short epoch are not drawn."""
        if self.images == 0:
            return

        def draw() -> None:
            for tag, image in report.figures(sample, classes).items():
                self._append(step, summary=image_summary(tag, image, dataformats="CHW"))

        self._drawings[split] = draw
        if time.monotonic() - self._drawn_at >= self._drawing_seconds / DRAWING_SHARE:
            self._draw()

    def _draw(self) -> None:
        drawings, self._drawings, start = self._drawings, {}, time.monotonic()
        for draw in drawings.values():
            draw()
        self._drawn_at = time.monotonic()
        self._drawing_seconds = self._drawn_at - start

    def on_epoch_end(self, summary: EpochSummary) -> None:
        self.log_metrics(summary.tagged_metrics(), summary.step)

    def on_test(self, metrics: dict[str, float], step: int, is_logged: bool) -> None:
        if not is_logged:
            self.log_metrics({f"test/{name}": value for name, value in metrics.items()}, step)

    def on_fit_end(self, run_dir: Path, metrics: dict[str, float]) -> None:
        self._draw()
        _, _, end = hparams({}, {})  # marks the run as finished in the HParams table
        self._add_summary(end, self._last_step)
        log.info("curves:     tensorboard --logdir %s", shlex.quote(str(run_dir)))

    def _add_summary(self, summary: Summary, step: int) -> None:
        self._last_step = step
        self._append(step, summary=summary)

    def _now(self) -> float:
        return time.time() - self._pause

    def _append(self, step: int, **content: object) -> None:
        """Write an event at the end of the file, after those that begin it if the file is new: whole or not at all."""
        events = [Event(wall_time=self._now(), step=step, **content)] if content else []
        size = self._file.stat().st_size if self._file.exists() else 0
        if not size:
            begin = [Event(wall_time=self._now(), file_version=VERSION)]
            if self._purge_step is not None:
                start = SessionLog(status=SessionLog.START)
                begin.append(Event(wall_time=self._now(), step=self._purge_step, session_log=start))
            events = [*begin, *events]
        try:
            with self._file.open("ab") as file:
                for event in events:
                    RecordWriter(file).write(event.SerializeToString())
        except OSError:
            with suppress(OSError):
                os.truncate(self._file, size)
            raise
        self._purge_step = None  # not before: a full disk would lose the purge


def write_header(run: RunInfo) -> None:
    """Write the file, or replace it whole. Raises OSError on a full disk.

    No experiment is written: TensorBoard takes the columns of its HParams table from the first experiment that it
    finds, so that keys which only other runs have would be lost. Without one it takes the keys of all runs.
    """
    config = text_summary("config", f"```yaml\n{run.config_yaml}```")
    events = [Event(wall_time=time.time(), file_version=VERSION)]
    for summary in (config, hyperparameters(run.hyperparameters, session_group(run)), custom_scalars(layout(run))):
        events.append(Event(wall_time=time.time(), step=0, summary=summary))
    unfinished = run.run_dir / "header.tmp"
    try:
        with unfinished.open("wb") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())
        os.replace(unfinished, run.run_dir / HEADER)
    finally:
        unfinished.unlink(missing_ok=True)


def session_group(run: RunInfo) -> str:
    """The name of the row of the HParams table that a run shares with others, whose metrics TensorBoard then averages:
    jobs of one sweep that differ only in seed or fold. Empty for a run that has a row of its own.
    """
    folder, words = run.run_dir.absolute().parent, run.facts.get("overrides", [])
    if not any(map(is_repeat, words)) or not (folder / "sweep.csv").exists():
        return ""
    return f"{shlex.join(setting_of(words))} in {folder}"


def hyperparameters(values: Mapping[str, Hyperparameter], group: str = "") -> Summary:
    """A row of the HParams table. torch's `hparams` would make numbers of truth values.

    group: of `session_group`. TensorBoard shows the values of one run of a group: those that differ are left out.
    """
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


def layout(run: RunInfo) -> dict[str, dict[str, Chart]]:
    """{category: {chart: ("Multiline", [regular expressions of tags])}} for the tab Custom Scalars."""
    results = {name: _lines(f"(train|val|test)/{name}") for name in run.metrics}
    results["best so far"] = _lines("best/.*")
    training = {
        "loss of the last steps": _lines("train/running_loss"),
        "learning rate": _lines("train/lr"),
    }
    if "trainer.max_grad_norm" in run.hyperparameters:
        training["gradient norm"] = _lines("train/grad_norm")
    speed = {
        "samples per second": _lines("speed/(samples|tokens)_per_s"),
        "step time (ms)": _lines("speed/step_ms"),
    }
    return {"results": results, "training": training, "speed": speed}


def _lines(*tags: str) -> Chart:
    return "Multiline", [f"^{tag}$" for tag in tags]


def last_wall_time(run_dir: Path, last_step: int) -> float | None:
    """The latest wall time, in seconds, of the events up to `last_step`, without step 0; None if there are none.

    With it a resumed run's relative x-axis has no pause in it.
    """
    times = [
        event.wall_time
        for path in run_dir.glob("events.out.tfevents.*")
        for event in read_events(path)
        if 0 < event.step <= last_step and event.HasField("summary")
    ]
    return max(times, default=None)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, except large ones, up to where a kill cut it off, or a crash of the machine left zeros.

    TensorBoard's own reader compares checksums in Python, which takes a second for each megabyte.
    """
    with path.open("rb") as file:
        while len(length := file.read(LENGTH.size)) == LENGTH.size:
            (size,) = LENGTH.unpack(length)
            file.seek(CHECKSUM_BYTES, 1)
            if size > LARGEST_READ:
                file.seek(size + CHECKSUM_BYTES, 1)
                continue
            content = file.read(size)
            if len(content) < size:
                return
            try:
                event = Event.FromString(content)
            except DecodeError:
                return
            yield event
            file.seek(CHECKSUM_BYTES, 1)
