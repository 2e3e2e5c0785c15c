"""logger=wandb, mlflow and trackio: config, curves and images of a run, on a tracking service.

A service may be slow, hang or be gone, and a training waits for none: a thread hands over what a run reports. What it
cannot hand over is lost there, with one warning; TensorBoard's files have it.
"""

import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal

from torch import Tensor

from lockstep.config.schema import Whole
from lockstep.files import write_whole
from lockstep.loggers.base import EpochSummary, Logger, RunInfo
from lockstep.tasks.base import ReadSample, Report

log = logging.getLogger(__name__)

QUEUED = 1000  # calls that wait for the service
CLOSE_SECONDS = 30.0  # that a finished run waits for what is left
PARAMETERS_AT_ONCE = 100  # that MLflow takes
LONGEST_PARAMETER = 6000  # characters


class Tracker(Logger):
    """What trackers share. A subclass says what to do with its service in the four methods below; a thread calls them.

    run_dir: folder of this run; it keeps the run's id on the service, so that a resumed run goes on there.
    images: test images that an evaluation shows; 0: no images of it.
    """

    def __init__(self, run_dir: str | Path, images: Whole) -> None:
        self.run_dir, self.images = Path(run_dir), images
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._thread = Thread(target=self._work, daemon=True)
        self._info: RunInfo | None = None
        self._has_begun = self._has_warned = False

    def begin(self, run: RunInfo, known: str | None) -> str:
        """Begin a run on the service, or go on with the one of the id `known`. Returns its id."""
        raise NotImplementedError

    def send(self, metrics: Mapping[str, float], step: int) -> None:
        """Numbers by tag."""
        raise NotImplementedError

    def send_image(self, tag: str, image: Tensor, step: int) -> None:
        """image: (height, width, 3), uint8."""
        raise NotImplementedError

    def end(self, finished: bool) -> None:
        """The run has finished, or stops or fails."""
        raise NotImplementedError

    def on_fit_start(self, run: RunInfo) -> None:
        self._info = run
        self._thread.start()
        self._put(lambda: None)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._put(lambda: self.send(metrics, step))

    def on_epoch_end(self, summary: EpochSummary) -> None:
        self.log_metrics(summary.tagged_metrics(), summary.step)

    def on_test(self, metrics: dict[str, float], step: int, is_logged: bool) -> None:
        if not is_logged:
            self.log_metrics({f"test/{name}": value for name, value in metrics.items()}, step)

    def log_report(self, report: Report, sample: ReadSample, classes: Sequence[str], step: int, split: str) -> None:
        for tag, figure in report.figures(sample, classes).items() if self.images else ():
            image = (figure * 255).round().byte() if figure.is_floating_point() else figure
            self._put(lambda tag=tag, image=image: self.send_image(tag, image.permute(1, 2, 0), step))  # type: ignore[misc]

    def on_fit_end(self, run_dir: Path, metrics: dict[str, float]) -> None:
        self._put(lambda: self.end(finished=True))

    def on_fit_stop(self, error: BaseException) -> None:
        self._put(lambda: self.end(finished=False))

    def close(self) -> None:
        if self._info is None:
            return
        self._calls.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn(f"it did not take everything within {CLOSE_SECONDS:.0f} s")

    def _put(self, call: Callable[[], None]) -> None:
        if self._calls.qsize() < QUEUED:
            self._calls.put(call)
        else:
            self._warn("it takes longer than the run reports")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                if not self._has_begun:  # also later, if the service was not there at the start
                    self._begin()
                call()
            except Exception as error:  # whatever a service's library raises, the training goes on
                self._warn(" ".join(f"{type(error).__name__}: {error}".split())[:200])

    def _begin(self) -> None:
        assert self._info is not None
        path = self.run_dir / f"{type(self).__name__}.id"
        known = path.read_text() if path.exists() and self._info.start_step else None
        write_whole(path, self.begin(self._info, known), sync=False)
        self._has_begun = True

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s loses a part of this run (%s); training goes on", type(self).__name__, why)

    @property
    def group(self) -> str | None:
        """The name of the sweep's folder, of a job of a sweep."""
        sweep = self.run_dir.absolute().parent
        return sweep.name if (sweep / "sweep.json").exists() else None


class WandbLogger(Tracker):
    """Weights & Biases. Offline, it leaves files in the run folder, which `wandb sync` sends later.

    run_dir: folder of this run.
    project: the run's project there.
    mode: offline, or online, which needs the environment variable WANDB_API_KEY.
    images: test images that an evaluation shows; 0: no images of it.
    """

    packages = ("wandb",)

    def __init__(self, run_dir: str, project: str, mode: Literal["offline", "online"], images: Whole) -> None:
        super().__init__(run_dir, images)
        self.project, self.mode = project, mode
        self.run: Any = None

    def begin(self, run: RunInfo, known: str | None) -> str:
        import wandb

        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True)
        self.run = wandb.init(
            project=self.project,
            mode=self.mode,
            dir=self.run_dir,
            id=known,
            resume="allow",
            name=self.run_dir.absolute().name,
            group=self.group,
            config=dict(run.facts["config"]),
            settings=settings,
        )
        self.run.define_metric("*", step_metric="step")  # a resumed run may begin before its last step
        return str(self.run.id)

    def send(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log({**metrics, "step": step})

    def send_image(self, tag: str, image: Tensor, step: int) -> None:
        import wandb

        self.run.log({tag: wandb.Image(image.numpy()), "step": step})

    def end(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class MLflowLogger(Tracker):
    """MLflow's tracking.

    run_dir: folder of this run.
    experiment: the run's experiment there, which is made if it is missing.
    uri: of the server, such as http://localhost:5000; null: what MLFLOW_TRACKING_URI says, or a file in this folder.
    images: test images that an evaluation shows; 0: no images of it.
    """

    packages = ("mlflow",)

    def __init__(self, run_dir: str, experiment: str, uri: str | None, images: Whole) -> None:
        super().__init__(run_dir, images)
        self.experiment, self.uri, self.id = experiment, uri, ""
        self.client: Any = None

    def begin(self, run: RunInfo, known: str | None) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of each table of its database
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient(tracking_uri=self.uri)
        if known is not None:
            self.client.update_run(known, status="RUNNING")
            self.id = known
            return known
        found = self.client.get_experiment_by_name(self.experiment)
        place = found.experiment_id if found is not None else self.client.create_experiment(self.experiment)
        tags = {} if self.group is None else {"group": self.group}
        self.id = str(self.client.create_run(place, run_name=self.run_dir.absolute().name, tags=tags).info.run_id)
        config = [Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in run.facts["config"].items()]
        for start in range(0, len(config), PARAMETERS_AT_ONCE):
            self.client.log_batch(self.id, params=config[start : start + PARAMETERS_AT_ONCE])
        return self.id

    def send(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        self.client.log_batch(self.id, metrics=[Metric(tag, value, now, step) for tag, value in metrics.items()])

    def send_image(self, tag: str, image: Tensor, step: int) -> None:
        self.client.log_image(self.id, image.numpy(), key=tag.replace("/", "_"), step=step)

    def end(self, finished: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


class TrackioLogger(Tracker):
    """Trackio, of Hugging Face. It keeps runs in a database of this machine, which `trackio show` shows, or sends them
    where the environment variable TRACKIO_SERVER_URL or TRACKIO_SPACE_ID says.

    run_dir: folder of this run.
    project: the run's project there.
    images: test images that an evaluation shows; 0: no images of it.
    """

    packages = ("trackio",)

    def __init__(self, run_dir: str, project: str, images: Whole) -> None:
        super().__init__(run_dir, images)
        import trackio  # not in the thread: the import draws from `random`, which a model may draw from, too

        self.trackio: Any = trackio
        self.project = project
        self.run: Any = None

    def begin(self, run: RunInfo, known: str | None) -> str:
        # It goes on with a run by its name.
        name = known or f"{self.run_dir.absolute().name}-{uuid.uuid4().hex[:8]}"
        self.run = self.trackio.init(
            project=self.project,
            name=name,
            group=self.group,
            config=dict(run.facts["config"]),
            resume="never" if known is None else "must",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def send(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def send_image(self, tag: str, image: Tensor, step: int) -> None:
        self.run.log({tag: self.trackio.Image(image.numpy())}, step=step)

    def end(self, finished: bool) -> None:
        self.run.finish()
