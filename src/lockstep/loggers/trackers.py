"""logger=wandb, mlflow and trackio: config and curves of a run on a tracking service, by the queues of their packages.

What a service does not take is lost there, with one warning.
"""

import importlib
import logging
import os
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.files import write_whole
from lockstep.loggers.base import Logger, RunInfo
from lockstep.runs.record import FINISHED, PAUSED

END_SECONDS = 60  # for what is still to be sent to MLflow


class Tracker(Logger):
    """What trackers share: the run's id on the service stays in the run folder, so that a resumed run goes on there.
    package: what is imported. options: of the package's own function that begins a run."""

    package = ""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.api: Any = importlib.import_module(self.package)  # not later: some draw from `random`, as a model may
        self.run: Any = None

    def begin(self, facts: Mapping[str, Any], known: str | None, folder: Path, group: str | None) -> str:
        """Begin a run on the service, or go on with the one of the id `known`. folder: of the run. group: of its sweep.
        Returns its id."""
        raise NotImplementedError

    def start(self, info: RunInfo) -> None:
        folder, sweep = Path(info.run.config.run_dir).absolute(), info.facts["sweep"]
        path = folder / f"{type(self).__name__}.id"
        known = path.read_text() if path.exists() and info.run.progress.step else None
        group = None if sweep is None else Path(sweep).name
        write_whole(path, self.begin(info.facts, known, folder, group), sync=False)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.run.log(metrics, step=step)

    def end(self, info: RunInfo, state: str) -> None:
        self.run.finish()


class WandbLogger(Tracker):
    """Weights & Biases, by `wandb.init`. With mode=offline it leaves files in the run folder, which `wandb sync` sends
    later; online it needs the environment variable WANDB_API_KEY."""

    package = "wandb"

    def begin(self, facts: Mapping[str, Any], known: str | None, folder: Path, group: str | None) -> str:
        mine = {"dir": folder, "name": folder.name, "group": group, "id": known, "resume": "allow"}
        mine |= {key: facts[key] for key in ("config", "tags", "notes")}
        self.run = self.api.init(**mine | self.options)
        self.run.define_metric("*", step_metric="step")  # a resumed run may begin before its last step
        return str(self.run.id)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.run.log({**metrics, "step": step})

    def end(self, info: RunInfo, state: str) -> None:
        self.run.finish(exit_code=info.exit_code)


class MLflowLogger(Tracker):
    """MLflow, by `mlflow.set_experiment`, on the server of MLFLOW_TRACKING_URI, else in a file in this folder."""

    package = "mlflow"

    def __init__(self, **options: Any) -> None:
        # The end of a run waits so long for a lost server.
        own = {"DISABLE_TELEMETRY": "true", "HTTP_REQUEST_TIMEOUT": "10", "HTTP_REQUEST_MAX_RETRIES": "3"}
        os.environ.update({f"MLFLOW_{key}": os.environ.get(f"MLFLOW_{key}", value) for key, value in own.items()})
        super().__init__(**options)  # the import sets the package's level
        logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # it tells of each table of its database
        self.sent: list[Any] = []  # calls that may be under way

    def begin(self, facts: Mapping[str, Any], known: str | None, folder: Path, group: str | None) -> str:
        self.api.set_experiment(**self.options)
        tags = dict.fromkeys(facts["tags"], "") | ({} if group is None else {"group": group})
        self.run = self.api.start_run(run_id=known, run_name=folder.name, tags=tags)
        if known is None:
            self.api.log_params(facts["config"])
        return str(self.run.info.run_id)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.sent.append(self.api.log_metrics(metrics, step, synchronous=False))

    def end(self, info: RunInfo, state: str) -> None:
        """Wait until all is sent: the process ends without its exit handlers. But the queue tries each call for a
        minute, and a server that is lost may have many of them."""
        status = "FINISHED" if state in (FINISHED, PAUSED) else "KILLED"
        ThreadPoolExecutor(1).submit(self._finish, status).result(END_SECONDS)

    def _finish(self, status: str) -> None:
        """Not by mlflow.end_run: each thread has its own active run."""
        self.api.MlflowClient().set_terminated(self.run.info.run_id, status)
        for call in self.sent:
            call.wait()


class TrackioLogger(Tracker):
    """Trackio, by `trackio.init`: runs in a database of this machine, which `trackio show` shows, or sent where the
    environment variable TRACKIO_SERVER_URL or TRACKIO_SPACE_ID says."""

    package = "trackio"

    def begin(self, facts: Mapping[str, Any], known: str | None, folder: Path, group: str | None) -> str:
        name, resume = known or f"{folder.name}-{uuid.uuid4().hex[:8]}", "never" if known is None else "must"
        self.run = self.api.init(name=name, group=group, config=facts["config"], resume=resume, **self.options)
        return name
