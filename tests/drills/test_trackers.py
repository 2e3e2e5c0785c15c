"""logger=wandb, mlflow and trackio with the real packages, and a real server of MLflow that is stopped and killed."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

import pytest

from support.commands import PYTHON_TRAIN, wait_for
from support.ports import free_port

pytestmark = pytest.mark.drill
SECRET = "a-key-that-nobody-may-see"


class Server:
    def __init__(self, folder):
        port = free_port()
        self.uri = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
        command += [f"--backend-store-uri=sqlite:///{folder}/server.db", f"--artifacts-destination={folder}/artifacts"]
        # Its queue of jobs leaves a folder in /dev/shm, where other tests look for what a run has left.
        own = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self.process = subprocess.Popen(command, cwd=folder, env=os.environ | own, start_new_session=True)
        wait_for(self._answers, "server of MLflow", limit=120)

    def _answers(self):
        with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
            return answer.status == 200
        return False

    def send(self, number):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def runs(self):
        from mlflow import MlflowClient

        client = MlflowClient(self.uri)
        experiment = client.get_experiment_by_name("lockstep")
        return list(client.search_runs([experiment.experiment_id])) if experiment is not None else []


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.send(signal.SIGKILL)


def assert_no_secret(folder):
    assert not [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def trained_twice(train, logger, **place):
    """A run of three epochs of two ranks that is paused after two, and a sweep of two jobs."""
    words = ["model=mlp", f"logger=[console,{logger}]", "launch=fork", "trainer.epochs=3"]
    train(*words, "hydra.run.dir=run", "trainer.pause_after=2", **place)
    run = train(*words, "hydra.run.dir=run", **place)
    train("-m", *words, "trainer.epochs=1", "seed=1,2", "hydra.sweep.dir=sweep", **place)
    assert_no_secret(run.cwd / "run")
    return json.loads((run.cwd / "run" / "run.json").read_text())["objective"]


def assert_one_curve(points, objective):
    assert [step for step, _ in points] == [number * points[0][0] for number in (1, 2, 3)]
    assert points[-1][1] == pytest.approx(objective["last"])


def test_mlflow_has_the_config_and_the_curves_and_a_resumed_run_goes_on(train, server):
    from mlflow import MlflowClient

    objective = trained_twice(train, "mlflow", MLFLOW_TRACKING_URI=server.uri, WANDB_API_KEY=SECRET)
    jobs = [one for one in server.runs() if one.info.run_name != "run"]
    (run,) = [one for one in server.runs() if one.info.run_name == "run"]
    assert run.info.status == "FINISHED"
    assert (run.data.params["trainer.epochs"], run.data.params["model.width"]) == ("3", "128")
    client = MlflowClient(server.uri)
    points = client.get_metric_history(run.info.run_id, objective["name"])
    assert_one_curve([(point.step, point.value) for point in points], objective)
    assert client.get_metric_history(run.info.run_id, "train/loss")
    assert [job.data.tags["group"] for job in jobs] == ["sweep", "sweep"]


def test_a_service_that_hangs_or_is_gone_costs_a_warning_and_no_step(start, server, tmp_path):
    words = ["model=mlp", "logger=[console,mlflow]", "trainer.epochs=200", "evaluation.every=50"]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        folder = tmp_path / number.name
        command = start(*PYTHON_TRAIN, *words, f"hydra.run.dir={folder}", MLFLOW_TRACKING_URI=server.uri)
        wait_for((folder / "MLflowLogger.id").exists, "run on the server", limit=120)
        server.send(number)
        command.finish(limit=200)
        assert command.output.count("loses a part of this run") == 1
        assert "epoch 200/200" in command.output
        server.send(signal.SIGCONT)


def test_wandb_offline_leaves_a_run_that_a_resumed_run_goes_on_with(train, tmp_path):
    words = ["model=mlp", "logger=[wandb]", "launch=fork", "trainer.epochs=2", "hydra.run.dir=run"]
    train(*words, "trainer.pause_after=1")
    time.sleep(1)  # W&B names its folders by the second
    train(*words)
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert (len(files), len({path.parent.name.rpartition("-")[2] for path in files})) == (2, 1)
    for path in files:  # its format is W&B's own
        assert b"train/loss" in path.read_bytes()
        assert b"optimizer.lr" in path.read_bytes()


def test_trackio_has_the_config_and_the_curves_and_a_resumed_run_goes_on(train, tmp_path):
    objective = trained_twice(train, "trackio", TRACKIO_DIR=str(tmp_path / "store"), HF_TOKEN=SECRET)
    with sqlite3.connect(tmp_path / "store" / "lockstep.db") as database:
        configs = [json.loads(config) for (config,) in database.execute("SELECT config FROM configs ORDER BY id")]
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert [config["_Group"] for config in configs] == [None, "sweep", "sweep"]
    assert configs[0]["trainer.epochs"] == 3
    of_run = [(step, json.loads(metrics)) for name, step, metrics in rows if name.startswith("run-")]
    assert_one_curve([(step, one[objective["name"]]) for step, one in of_run if "val/loss" in one], objective)
    assert "WARNING" not in (tmp_path / "run" / "train.log").read_text()
    assert_no_secret(tmp_path)


def test_trackio_without_its_server_costs_a_warning_and_no_step(train, tmp_path):
    words = ["model=mlp", "logger=[console,trackio]", "trainer.epochs=3", "hydra.run.dir=run"]
    place = {"TRACKIO_DIR": str(tmp_path / "store"), "TRACKIO_SERVER_URL": f"http://127.0.0.1:{free_port()}"}
    output = train(*words, **place).output
    assert "epoch 3/3" in output
    assert output.count("TrackioLogger loses a part of this run") == 1


@pytest.mark.new_process
def test_a_package_that_is_missing_is_named_before_anything_starts(train, tmp_path):
    hidden = "import sys\nsys.modules['wandb'] = sys.modules['mlflow'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    command = train("logger=[wandb]", code=2, PYTHONPATH=tmp_path)
    assert "logger=wandb needs wandb; type pip install wandb" in command.output
