"""logger=wandb, mlflow and trackio: config, curves and images of a run, on a tracking service.

Their packages queue what they get and send it from threads or processes of their own. What a service does not take is
lost there, with one warning; TensorBoard's files have it.
"""

import logging
import os
import uuid
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from lockstep.config.schema import Whole
from lockstep.files import write_whole
from lockstep.loggers.base import Logger, RunInfo
from lockstep.runs.record import FINISHED, PAUSED

END_SECONDS = 60  # for what is still to be sent to MLflow


class Tracker(Logger):
    """What trackers share: the run's id on the service stays in the run folder, so that a resumed run goes on there.

    run_dir: folder of this run. images: test images that an evaluation shows; 0: no images of it. project: on the
    service.
    """

    def __init__(self, run_dir: str | Path, images: Whole, project: str) -> None:
        self.run_dir, self.images, self.project = Path(run_dir), images, project
        self.name = self.run_dir.absolute().name

    def begin(self, info: RunInfo, known: str | None, group: str | None) -> str:
        """Begin a run on the service, or go on with the one of the id `known`. group: of its sweep. Returns its id."""
        raise NotImplementedError

    def start(self, info: RunInfo) -> None:
        path, sweep = self.run_dir / f"{type(self).__name__}.id", info.facts["sweep"]
        known = path.read_text() if path.exists() and info.run.progress.step else None
        write_whole(path, self.begin(info, known, None if sweep is None else Path(sweep).name), sync=False)


class WandbLogger(Tracker):
    """Weights & Biases. Offline, it leaves files in the run folder, which `wandb sync` sends later.

    mode: offline, or online, which needs the environment variable WANDB_API_KEY.
    """

    packages = ("wandb",)

    def __init__(self, run_dir: str, project: str, mode: Literal["offline", "online"], images: Whole) -> None:
        super().__init__(run_dir, images, project)
        self.mode = mode

    def begin(self, info: RunInfo, known: str | None, group: str | None) -> str:
        import wandb

        self.run: Any = wandb.init(
            project=self.project,
            mode=self.mode,
            dir=self.run_dir,
            id=known,
            resume="allow",
            name=self.name,
            group=group,
            config=dict(info.facts["config"]),
            tags=list(info.facts["tags"]),
            notes=info.facts["notes"],
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True),
        )
        self.run.define_metric("*", step_metric="step")  # a resumed run may begin before its last step
        return str(self.run.id)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.run.log({**metrics, "step": step})

    def image(self, tag: str, image: Tensor, step: int) -> None:
        import wandb

        self.log({tag: wandb.Image(pixels(image))}, step)

    def end(self, info: RunInfo, state: str) -> None:
        self.run.finish(exit_code=0 if state in (FINISHED, PAUSED) else 1)


class MLflowLogger(Tracker):
    """MLflow's tracking.

    experiment: the run's experiment there, which is made if it is missing. uri: of the server, such as
    http://localhost:5000; null: what MLFLOW_TRACKING_URI says, or a file in this folder.
    """

    packages = ("mlflow",)

    def __init__(self, run_dir: str, experiment: str, uri: str | None, images: Whole) -> None:
        super().__init__(run_dir, images, experiment)
        self.uri = uri
        self.sent: list[Any] = []  # calls that may be under way

    def begin(self, info: RunInfo, known: str | None, group: str | None) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # the end of a run waits so long for a lost server
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        import mlflow  # which sets its own level

        logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # it tells of each table of its database
        if self.uri is not None:
            mlflow.set_tracking_uri(self.uri)
        mlflow.set_experiment(self.project)
        tags = dict.fromkeys(info.facts["tags"], "") | ({} if group is None else {"group": group})
        run = mlflow.start_run(run_id=known, run_name=self.name, tags=tags)
        if known is None:
            mlflow.log_params(dict(info.facts["config"]))
        self.mlflow: Any = mlflow
        self.id = str(run.info.run_id)
        return self.id

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.sent.append(self.mlflow.log_metrics(metrics, step, synchronous=False))

    def image(self, tag: str, image: Tensor, step: int) -> None:
        self.mlflow.log_image(pixels(image), key=tag.replace("/", "_"), step=step, synchronous=False)

    def end(self, info: RunInfo, state: str) -> None:
        """Wait until all is sent: the process ends without its exit handlers."""
        # The queue tries each call for a minute, and a server that is lost may have many of them.
        sending = ThreadPoolExecutor(1).submit(self._finish, "FINISHED" if state in (FINISHED, PAUSED) else "KILLED")
        if not wait([sending], END_SECONDS).done:
            raise TimeoutError(f"the server has not taken all within {END_SECONDS} s of the end")
        sending.result()

    def _finish(self, status: str) -> None:
        """Not by mlflow.end_run: each thread has its own active run."""
        self.mlflow.MlflowClient().set_terminated(self.id, status)
        for call in self.sent:
            call.wait()


class TrackioLogger(Tracker):
    """Trackio, of Hugging Face. It keeps runs in a database of this machine, which `trackio show` shows, or sends them
    where the environment variable TRACKIO_SERVER_URL or TRACKIO_SPACE_ID says.
    """

    packages = ("trackio",)

    def __init__(self, run_dir: str, project: str, images: Whole) -> None:
        super().__init__(run_dir, images, project)
        import trackio  # not later: the import draws from `random`, which a model may draw from, too

        self.trackio: Any = trackio

    def begin(self, info: RunInfo, known: str | None, group: str | None) -> str:
        name = known or f"{self.name}-{uuid.uuid4().hex[:8]}"  # by which a resumed run goes on
        self.run: Any = self.trackio.init(
            project=self.project,
            name=name,
            group=group,
            config=dict(info.facts["config"]),
            resume="never" if known is None else "must",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def image(self, tag: str, image: Tensor, step: int) -> None:
        self.log({tag: self.trackio.Image(pixels(image))}, step)

    def end(self, info: RunInfo, state: str) -> None:
        self.run.finish()


def pixels(image: Tensor) -> Any:
    """(3, height, width) from 0 to 1 as (height, width, 3) of uint8, in numpy."""
    return (image * 255).round().byte().permute(1, 2, 0).numpy()
