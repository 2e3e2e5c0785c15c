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
    client = notebook(python_blocks(ROOT / "docs" / "python.md"))
    client.execute()
    trained, losses, stopped, predicted, checked, composed = map(output_of, client.nb.cells)
    assert "rank 0 of 2" in trained
    assert "epoch 3/3" in trained
    folder, accuracy = trained.splitlines()[-1].split()
    assert float(accuracy) > 0.8
    assert [step for step, _ in eval(losses)] == sorted({step for step, _ in eval(losses)})
    assert len(eval(losses)) == 3
    assert stopped.splitlines()[-1] == "True"
    assert stopped.count("epoch 3/4") == 1
    assert len(eval(predicted)) == 2
    assert checked.splitlines()[-2].startswith("every weight learns")
    assert composed.splitlines()[0] == "5 128 0.05"
    assert composed.count("outputs/") == 2
    assert folder in composed


def test_an_interrupt_of_the_kernel_saves_and_the_call_that_it_names_goes_on(notebook: Any, tmp_path: Path) -> None:
    words = '["model=mlp", "trainer.epochs=2000", "hydra.run.dir=outputs/long"]'
    client = notebook([f"import lockstep\nlockstep.train({words}, ranks=2)"])
    ends = threading.Thread(target=lambda: interrupt_when(client, tmp_path / "outputs" / "long" / "snapshots"))
    ends.start()
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt.*to go on, type lockstep.train.*nproc_per_node=2"):
        client.execute()
    ends.join()
    said = output_of(client.nb.cells[0])
    assert "go on there with hydra.run.dir=" in said
    snapshots = sorted((tmp_path / "outputs" / "long" / "snapshots").glob("step_*[0-9]"))
    call = f"lockstep.train({words.replace('2000', '1')[:-1]}, 'trainer.max_steps=1'])"
    again = python(tmp_path, "-c", f"import lockstep\n{call}")
    assert f"step {int(snapshots[-1].stem[5:])}" in again.stdout


def interrupt_when(client: NotebookClient, snapshots: Path) -> None:
    wait_for(lambda: any(snapshots.glob("step_*[0-9]")), "snapshot", limit=90)
    pid = client.km.provisioner.pid
    os.killpg(os.getpgid(pid), 2)  # as Jupyter does


def python(folder: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """`python <words>`, typed in `folder`, which finds lockstep."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")} | variables
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, text=True, capture_output=True, timeout=120)


def test_what_cannot_work_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="trainer.epoch is no key of this config; type trainer.epochs=2"):
        lockstep.train(["trainer.epoch=2"])
    with pytest.raises(ConfigError, match="trainer.epoch is no key of this config; type trainer.epochs=2"):
        lockstep.compose(["trainer.epoch=2"])
    (tmp_path / "broken_nets.py").write_text("def net():\n    from torch import nn\n    return nn.Linear(3, 10)\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["model=linear", "model._target_=broken_nets.net", "~model.shape", "~model.classes", "logger=[]"]
    with pytest.raises(RankFailed, match="rank 0 of 1 failed first") as failed:
        lockstep.train(words)
    assert failed.value.report["first"]["type"] == "RuntimeError"


def test_compose_gives_what_the_command_would_train_with(tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "wide.yaml").write_text("defaults: [mlp]\nwidth: 512\n")
    config = lockstep.compose([f"--config-dir={tmp_path}/conf", "model=wide", "trainer.epochs=7", "run_dir=runs/a"])
    assert (config.model["width"], config.trainer.epochs, config.run_dir) == (512, 7, "runs/a")
    assert config.model["classes"] == config.dataset["classes"]  # interpolations are resolved
    assert lockstep.compose("model=mlp '+vars.sizes=[1, 2]'").vars == {"sizes": [1, 2]}


OWN_PROGRAM = """
import hydra
import lockstep
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import getbase


def known():
    return GlobalHydra.instance(), GlobalHydra.instance().hydra, HydraConfig.instance().cfg, getbase()


@hydra.main(version_base="1.2", config_path=".", config_name="own")
def main(cfg):
    before = known()
    print(lockstep.compose(["model=mlp", "trainer.epochs=7"]).trainer.epochs)
    try:
        lockstep.compose(["trainer.epoch=3"])
    except lockstep.errors.ConfigError as error:
        print(error)
    assert all(now is then for now, then in zip(known(), before, strict=True))
    print(cfg.number, HydraConfig.get().job.name)


main()
"""


def test_compose_works_inside_a_hydra_main_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("number: 3\n")
    (tmp_path / "program.py").write_text(OWN_PROGRAM)
    said = python(tmp_path, "program.py", "number=4").stdout.splitlines()
    assert said == ["7", "trainer.epoch is no key of this config; type trainer.epochs=3", "4 program"]


NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, classes))
"""
OWN_SCRIPT = """
import sys

import torch

import lockstep

sys.path.insert(0, "nets")
overrides = ["model._target_=far.Net", "optimizer._target_=beside.Descent", "trainer.epochs=1"]
for held_out in ("0.1", "null"):
    result = lockstep.train([*overrides, f"loader.validation={held_out}", f"hydra.run.dir=runs/{held_out}"], ranks=2)
    net = result.net()
    print("net", type(net.net).__module__, len(net.predict(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))))
"""


def test_ranks_import_what_the_caller_can_and_a_net_of_ones_own_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "far.py").write_text(NET)
    (tmp_path / "beside.py").write_text("import torch\n\nclass Descent(torch.optim.SGD):\n    pass\n")
    (tmp_path / "script.py").write_text(OWN_SCRIPT)
    said = python(tmp_path, "script.py").stdout
    assert said.count("rank 0 of 2") == 2
    assert said.count("net far 2") == 2  # the best one, and where nothing chooses the last one
    (tmp_path / "later.py").write_text("import lockstep\nprint(type(lockstep.load('runs/0.1', 'best').net))\n")
    later = python(tmp_path, "later.py", PYTHONPATH=f"{ROOT / 'src'}:{tmp_path / 'nets'}")
    assert later.stdout == "<class 'far.Net'>\n"


def test_check_is_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert "\nevery weight learns" in lockstep.check(["model=linear"])
    with pytest.raises(AssertionError, match="gradients, .*; change the gradient .* or type gradient_sync=auto"):
        lockstep.check("model=linear gradient_sync=fp16")
    with pytest.raises(ConfigError, match="trainer.epoch is no key of this config; type trainer.epochs=2"):
        lockstep.check(["trainer.epoch=2"])
    assert "promise" in capfd.readouterr().out
    assert not list(tmp_path.iterdir())
