"""TensorBoard's event files, read by TensorBoard's own reader."""

import io
import json
from typing import NamedTuple

MEASURED = ("speed/", "time/", "world/")  # tags of times and memory, which differ between equal runs


def read(folder):
    """TensorBoard's reader of a run folder, with all that is in it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance=dict.fromkeys(("scalars", "images"), 0))
    reader.Reload()
    return reader


def scalars(folder):
    """{tag: [(step, value), ...]} of a run folder."""
    reader = read(folder)
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


class Row(NamedTuple):
    """A run in TensorBoard's HParams table. metrics: {tag: last value}."""

    hyperparameters: dict
    metrics: dict[str, float]
    status: str


class Backend:
    """TensorBoard's own server over a folder, asked as its pages ask it, without a port."""

    def __init__(self, folder):
        from tensorboard.backend import application
        from tensorboard.backend.event_processing.data_ingester import LocalDataIngester
        from tensorboard.program import TensorBoard
        from werkzeug.test import Client

        board = TensorBoard()
        board.configure(argv=["tensorboard", "--logdir", str(folder)])
        ingester = LocalDataIngester(board.flags)
        ingester.deprecated_multiplexer.AddRunsFromDirectory(str(folder))
        ingester.deprecated_multiplexer.Reload()
        of_board = (board.flags, board.plugin_loaders, ingester.data_provider, board.assets_zip_provider)
        self.client = Client(application.TensorBoardWSGIApp(*of_board, ingester.deprecated_multiplexer))

    def _ask(self, path, body=None):
        answer = self.client.get(path) if body is None else self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text)

    def runs(self):
        return sorted(self._ask("/data/runs"))

    def columns(self):
        """The hyperparameters of the HParams table: name, type, and whether the runs differ."""
        return self._ask("/data/plugin/hparams/experiment", {"experimentName": ""})["hparamInfos"]

    def rows(self):
        """{run: its Row in the HParams table}."""
        statuses = [f"STATUS_{name}" for name in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")]
        body = {"experimentName": "", "allowedStatuses": statuses, "colParams": [], "startIndex": 0, "sliceSize": 1000}
        found = {}
        for group in self._ask("/data/plugin/hparams/session_groups", body)["sessionGroups"]:
            metrics = {metric["name"]["tag"]: metric["value"] for metric in group["metricValues"]}
            found[group["name"]] = Row(group["hparams"], metrics, group["sessions"][0]["status"])
        return found

    def layout(self):
        """The categories of the Custom Scalars tab."""
        return self._ask("/data/plugin/custom_scalars/layout")["category"]


def images(folder):
    """{tag: (step, PIL image)}: the newest image of each tag of a run folder."""
    from PIL import Image

    reader = read(folder)
    newest = {tag: reader.Images(tag)[-1] for tag in reader.Tags()["images"]}
    return {tag: (one.step, Image.open(io.BytesIO(one.encoded_image_string))) for tag, one in newest.items()}
