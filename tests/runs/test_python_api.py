"""`lockstep.train` and its like, called in a real Jupyter kernel and from a script."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import lockstep
from lockstep.errors import ConfigError, RankFailed
from support.commands import ROOT, wait_for
from support.pages import python_blocks


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """notebook(cells) -> the client of a kernel whose folder is `tmp_path`."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))

    def made(cells: list[str]) -> NotebookClient:
        page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
        return NotebookClient(page, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})

    return made


def output_of(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_the_page_runs_in_a_notebook(notebook: Any, tmp_path: Path) -> None:
    client = notebook(python_blocks(ROOT / "docs" / "notebooks.md"))
    client.execute()
    trained, losses, stopped, predicted, composed = map(output_of, client.nb.cells)
    assert "rank 0 of 2" in trained
    assert "epoch 3/3" in trained
    folder, accuracy = trained.splitlines()[-1].split()
    assert float(accuracy) > 0.8
    assert [step for step, _ in eval(losses)] == sorted({step for step, _ in eval(losses)})
    assert len(eval(losses)) == 3
    assert stopped.splitlines()[-1] == "True"
    assert stopped.count("epoch 3/4") == 1
    assert len(eval(predicted)) == 2
    assert composed.splitlines()[0] == "128 0.05"
    assert composed.count("outputs/") == 2
    assert folder in composed


def test_an_interrupt_of_the_kernel_saves_and_the_call_that_it_names_goes_on(notebook: Any, tmp_path: Path) -> None:
    words = '["model=mlp", "trainer.epochs=2000", "hydra.run.dir=outputs/long"]'
    client = notebook([f"import lockstep\nlockstep.train({words}, ranks=2)"])
    ends = threading.Thread(target=lambda: interrupt_when(client, tmp_path / "outputs" / "long" / "snapshots"))
    ends.start()
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt.*to go on, type lockstep.train.*ranks=2"):
        client.execute()
    ends.join()
    said = output_of(client.nb.cells[0])
    assert "go on there with hydra.run.dir=" in said
    snapshots = sorted((tmp_path / "outputs" / "long" / "snapshots").glob("step_*.pt"))
    again = lockstep_in(tmp_path, f"lockstep.train({words.replace('2000', '1')[:-1]}, 'trainer.max_steps=1'])")
    assert f"step {int(snapshots[-1].stem[5:])}" in again.stdout


def interrupt_when(client: NotebookClient, snapshots: Path) -> None:
    wait_for(lambda: any(snapshots.glob("step_*.pt")), "snapshot", limit=90)
    pid = client.km.provisioner.pid
    os.killpg(os.getpgid(pid), 2)  # as Jupyter does


def lockstep_in(folder: Path, call: str) -> "subprocess.CompletedProcess[str]":
    path = str(ROOT / "src")
    command = [sys.executable, "-c", f"import lockstep\n{call}"]
    return subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, text=True, capture_output=True, timeout=120
    )


def test_what_cannot_work_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="trainer.epoch is no key of this config; type trainer.epochs=2"):
        lockstep.train(["trainer.epoch=2"])
    with pytest.raises(ConfigError, match="trainer.epoch is no key of this config; type trainer.epochs=2"):
        lockstep.compose(["trainer.epoch=2"])
    with pytest.raises(ConfigError, match="ranks=2 and a typed launch both .*leave ranks= out"):
        lockstep.train(["launch=fork"], ranks=2)
    (tmp_path / "broken_nets.py").write_text("def net():\n    from torch import nn\n    return nn.Linear(3, 10)\n")
    words = ["model=linear", "model._target_=broken_nets.net", "~model.shape", "~model.classes", "logger=[]"]
    with pytest.raises(RankFailed, match="rank 0 of 1 failed first") as failed:
        lockstep.train(words)
    assert failed.value.report["first"]["type"] == "RuntimeError"


def test_compose_gives_what_the_command_would_train_with(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "wide.yaml").write_text("defaults: [mlp]\nwidth: 512\n")
    config = lockstep.compose([f"--config-dir={tmp_path}", "model=wide", "trainer.epochs=7", "run_dir=runs/a"])
    assert (config.model.width, config.trainer.epochs, config.run_dir) == (512, 7, "runs/a")
    assert config.objective.endswith("/accuracy")  # interpolations are resolved
