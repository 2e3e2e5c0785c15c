"""What TensorBoard shows of a run beside its curves: the config, a row of the HParams table, a layout of charts.

All of it is in one small file beside the curves, which every start writes anew. TensorBoard keeps the first
hyperparameters that it reads of a run, and it reads files in the order of their names: so this file comes first.
"""

import os
import time
from collections.abc import Iterable, Mapping

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.hparams.metadata import PLUGIN_DATA_VERSION, PLUGIN_NAME, SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, hparams, text

from lockstep.loggers.base import Hyperparameter, RunInfo

HEADER = "events.out.tfevents.0.header"

Chart = tuple[str, list[str]]
Layout = dict[str, dict[str, Chart]]


def write_header(run: RunInfo) -> None:
    """Write the file, or replace it whole. Raises OSError on a full disk.

    No experiment is written: TensorBoard takes the columns of its HParams table from the first experiment that it
    finds, so that keys which only other runs have would be lost. Without one it takes the keys of all runs.
    """
    config = text("config", f"```yaml\n{run.config_yaml}```")
    summaries = [config, hyperparameters(run.hyperparameters), custom_scalars(layout(run))]
    unfinished = run.run_dir / "header.tmp"
    try:
        with unfinished.open("wb") as file:
            writer = RecordWriter(file)
            for event in _events(summaries):
                writer.write(event.SerializeToString())
        os.replace(unfinished, run.run_dir / HEADER)
    finally:
        unfinished.unlink(missing_ok=True)


def hyperparameters(values: Mapping[str, Hyperparameter]) -> Summary:
    """A row of the HParams table. torch's `hparams` would make numbers of truth values."""
    start = SessionStartInfo(start_time_secs=time.time())
    for key, value in values.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[key].number_value = value
        else:
            start.hparams[key].string_value = value
    content = HParamsPluginData(session_start_info=start, version=PLUGIN_DATA_VERSION).SerializeToString()
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=content))
    return Summary(value=[Summary.Value(tag=SESSION_START_INFO_TAG, metadata=metadata)])


def finished() -> Summary:
    """What marks the run as finished in the HParams table."""
    _, _, end = hparams({}, {})
    return end


def layout(run: RunInfo) -> Layout:
    """{category: {chart: ("Multiline", [regular expressions of tags])}} for the tab Custom Scalars."""
    results = {name: _lines(f"(train|test)/{name}") for name in run.metrics}
    results["best so far"] = _lines("best/.*")
    training = {
        "loss of the last steps": _lines("train/running_loss"),
        "learning rate": _lines("train/lr"),
        "gradient norm": _lines("train/grad_norm"),
    }
    speed = {
        "samples per second": _lines("speed/(samples|tokens)_per_s"),
        "step time (ms)": _lines("speed/step_ms"),
        "parts of a step (ms)": _lines("time/.*_ms", "profile/.*_ms"),
    }
    ranks = {
        "own time of the slowest and the fastest rank in a step (ms)": _lines("world/(slowest|fastest)_rank_ms"),
        "memory of the largest and the smallest rank (MiB)": _lines("world/.*_rank_mib"),
    }
    return {"results: train and test": results, "training": training, "speed": speed, "ranks": ranks}


def _lines(*tags: str) -> Chart:
    return "Multiline", [f"^{tag}$" for tag in tags]


def _events(summaries: Iterable[Summary]) -> Iterable[Event]:
    yield Event(wall_time=time.time(), file_version="brain.Event:2")
    for summary in summaries:
        yield Event(wall_time=time.time(), step=0, summary=summary)
