"""logger=wandb, mlflow and trackio with the real packages, and a real server of MLflow that is stopped and killed."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.commands import PYTHON_TRAIN, Command, wait_for
from support.ports import free_port

pytestmark = pytest.mark.drill
SHORT = ["model=mlp", "logger=[console,mlflow]"]
SECRET = "a-key-that-nobody-may-see"


class Server:
    """MLflow's own, with sqlite."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.uri = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
        command += [f"--backend-store-uri=sqlite:///{folder}/server.db", f"--artifacts-destination={folder}/artifacts"]
        # Its queue of jobs leaves a folder in /dev/shm, where other tests look for what a run has left.
        own = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self.process = subprocess.Popen(command, cwd=folder, env=os.environ | own, start_new_session=True)
        wait_for(self._answers, "server of MLflow", limit=120)

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
            return answer.status == 200
        return False

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def runs(self) -> list[Any]:
        from mlflow import MlflowClient

        client = MlflowClient(self.uri)
        experiment = client.get_experiment_by_name("lockstep")
        return list(client.search_runs([experiment.experiment_id])) if experiment is not None else []


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "server").mkdir()
    made = Server(tmp_path / "server")
    yield made
    made.send(signal.SIGKILL)


def test_mlflow_has_the_config_and_the_curves_and_a_resumed_run_goes_on(
    train: Callable[..., Command], server: Server, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    words = [*SHORT, "launch=fork", "trainer.epochs=3"]
    place = {"MLFLOW_TRACKING_URI": server.uri, "WANDB_API_KEY": SECRET}
    train(*words, "hydra.run.dir=run", "trainer.pause_after=2", **place).finish()
    train(*words, "hydra.run.dir=run", **place).finish()
    (run,) = server.runs()
    client = MlflowClient(server.uri)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert (run.data.params["trainer.epochs"], run.data.params["model.width"]) == ("3", "128")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    objective = client.get_metric_history(run.info.run_id, record["objective"]["name"])
    assert [point.step for point in objective] == [number * objective[0].step for number in (1, 2, 3)]
    assert objective[-1].value == pytest.approx(record["objective"]["last"])
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")]
    train("-m", *words, "trainer.epochs=1", "seed=1,2", "hydra.sweep.dir=sweep", **place).finish()
    assert [job.data.tags["group"] for job in server.runs() if job.info.run_id != run.info.run_id] == ["sweep", "sweep"]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["gone", "hangs"])
def test_a_service_that_is_lost_costs_a_warning_and_no_step(
    start: Callable[..., Command], server: Server, tmp_path: Path, number: int
) -> None:
    command = start(
        *PYTHON_TRAIN, *SHORT, "trainer.epochs=400", "hydra.run.dir=run", "evaluation.every=50",
        MLFLOW_TRACKING_URI=server.uri,
    )  # fmt: skip
    wait_for(lambda: (tmp_path / "run" / "MLflowLogger.id").exists(), "run on the server", limit=120)
    server.send(number)
    command.finish(limit=200)
    warnings = [line for line in command.output.splitlines() if "loses a part of this run" in line]
    assert len(warnings) == 1
    assert "epoch 400/400" in command.output


def test_wandb_offline_leaves_a_run_that_a_resumed_run_goes_on_with(
    train: Callable[..., Command], tmp_path: Path
) -> None:
    words = ["model=mlp", "logger=[wandb]", "launch=fork", "trainer.epochs=2", "hydra.run.dir=run"]
    train(*words, "trainer.pause_after=1").finish()
    time.sleep(1)  # W&B names its folders by the second
    train(*words).finish()
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    ids = {path.parent.name.rpartition("-")[2] for path in files}
    assert len(ids) == 1
    for path in files:  # its format is W&B's own
        assert b"train/loss" in path.read_bytes()
        assert b"optimizer.lr" in path.read_bytes()


def test_trackio_has_the_config_and_the_curves_and_a_resumed_run_goes_on(
    train: Callable[..., Command], tmp_path: Path
) -> None:
    words = ["model=mlp", "logger=[trackio]", "launch=fork", "trainer.epochs=3"]
    place = {"TRACKIO_DIR": str(tmp_path / "store"), "HF_TOKEN": SECRET}
    train(*words, "hydra.run.dir=run", "trainer.pause_after=2", **place).finish()
    train(*words, "hydra.run.dir=run", **place).finish()
    train("-m", *words, "seed=1,2", "hydra.sweep.dir=sweep", **place).finish()
    with sqlite3.connect(tmp_path / "store" / "lockstep.db") as database:
        configs = [json.loads(config) for (config,) in database.execute("SELECT config FROM configs ORDER BY id")]
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert [config["_Group"] for config in configs] == [None, "sweep", "sweep"]
    assert configs[0]["trainer.epochs"] == 3
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    of_run = [(step, json.loads(metrics)) for name, step, metrics in rows if name.startswith("run-")]
    steps, values = zip(
        *[(step, one[record["objective"]["name"]]) for step, one in of_run if "val/loss" in one], strict=True
    )
    assert steps == tuple(number * steps[0] for number in (1, 2, 3))
    assert values[-1] == pytest.approx(record["objective"]["last"])
    assert "WARNING" not in (tmp_path / "run" / "train.log").read_text()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_trackio_without_its_server_costs_a_warning_and_no_step(train: Callable[..., Command], tmp_path: Path) -> None:
    words = ["model=mlp", "logger=[console,trackio]", "trainer.epochs=3", "hydra.run.dir=run"]
    place = {"TRACKIO_DIR": str(tmp_path / "store"), "TRACKIO_SERVER_URL": f"http://127.0.0.1:{free_port()}"}
    command = train(*words, **place).finish(limit=120)
    assert "epoch 3/3" in command.output
    assert command.output.count("TrackioLogger loses a part of this run") == 1


@pytest.mark.new_process
def test_a_package_that_is_missing_is_named_before_anything_starts(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(
        "import sys\nsys.modules['wandb'] = sys.modules['mlflow'] = None\n"
    )
    command = start(*PYTHON_TRAIN, "logger=[wandb]", PYTHONPATH=tmp_path / "hidden")
    assert "logger=wandb needs wandb; type pip install wandb" in command.finish(2).output
