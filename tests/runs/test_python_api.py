"""`lockstep.train` and its like, called in a real Jupyter kernel and from a script."""

import os
import re
import subprocess
import sys
import threading

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import lockstep
from lockstep.errors import ConfigError, RankFailed
from support.commands import BY_LOSS, ROOT, wait_for
from support.configs import composed
from support.pages import python_blocks
from support.worlds import in_world, train


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """notebook(cells) -> the client of a kernel whose folder is `tmp_path`."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))

    def made(cells):
        page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
        return NotebookClient(page, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})

    return made


@pytest.fixture
def python(tmp_path):
    """python(*words) -> what `python <words>`, typed in `tmp_path`, prints."""

    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    common = {"cwd": tmp_path, "env": env, "text": True, "capture_output": True, "timeout": 120}
    return lambda *words: subprocess.run([sys.executable, *words], **common).stdout


def output_of(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.drill
def test_the_page_runs_in_a_notebook(notebook):
    client = notebook(python_blocks(ROOT / "docs" / "python.md"))
    client.execute()
    trained, losses, stopped, predicted, checked, composed = map(output_of, client.nb.cells)
    assert "rank 0 of 2" in trained
    assert "epoch 3/3" in trained
    folder, accuracy = trained.splitlines()[-1].split()
    assert float(accuracy) > 0.8
    steps = [step for step, _ in eval(losses)]
    assert (len(steps), steps) == (3, sorted({*steps}))
    assert (stopped.splitlines()[-1], stopped.count("epoch 3/4")) == ("True", 1)
    assert len(eval(predicted)) == 2
    assert checked.splitlines()[-2].startswith("every weight learns")
    assert composed.splitlines()[0] == "5 128 0.05"
    assert composed.count("outputs/") == 2
    assert folder in composed


@pytest.mark.drill
def test_an_interrupt_of_the_kernel_saves_and_the_call_that_it_names_goes_on(notebook, python, tmp_path):
    words, folder = '["model=mlp", "trainer.epochs=2000", "hydra.run.dir=long"]', tmp_path / "long" / "snapshots"
    client = notebook([f"import lockstep\nlockstep.train({words}, ranks=2)"])

    def interrupt():
        wait_for(lambda: any(folder.glob("step_*[0-9]")), "snapshot", limit=90)
        os.killpg(os.getpgid(client.km.provisioner.pid), 2)  # as Jupyter does

    ends = threading.Thread(target=interrupt)
    ends.start()
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt.*to go on, type lockstep.train.*nproc_per_node=2"):
        client.execute()
    ends.join()
    assert "go on there with hydra.run.dir=" in output_of(client.nb.cells[0])
    newest = max(int(path.name[5:]) for path in folder.glob("step_*[0-9]"))
    call = f"lockstep.train({words.replace('2000', '1')[:-1]}, 'trainer.max_steps=1'])"
    assert f"step {newest}" in python("-c", f"import lockstep\n{call}")


def test_what_cannot_work_is_raised_and_check_is_a_test(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="gradients, .*; change the gradient .* or type gradient_sync=auto"):
        lockstep.check("model=linear gradient_sync=fp16")
    assert "promise" in capfd.readouterr().out
    for function in (lockstep.check, lockstep.compose, lockstep.train):
        with pytest.raises(ConfigError, match="trainer.epoch is no key of this config; type trainer.epochs=2"):
            function(["trainer.epoch=2"])
        assert not list(tmp_path.iterdir())
    (tmp_path / "broken_nets.py").write_text("def net():\n    from torch import nn\n    return nn.Linear(3, 10)\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["model=linear", "model._target_=broken_nets.net", "~model.shape", "~model.classes", "logger=[]"]
    with pytest.raises(RankFailed, match="rank 0 of 1 failed first") as failed:
        lockstep.train(words)
    assert failed.value.report["first"]["type"] == "RuntimeError"


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
    assert all(now is then for now, then in zip(known(), before, strict=True))
    print(cfg.number, HydraConfig.get().job.name)

main()
"""


def test_compose_gives_what_the_command_would_train_with_also_inside_a_hydra_main(python, tmp_path):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "wide.yaml").write_text("defaults: [mlp]\nwidth: 512\n")
    config = lockstep.compose([f"--config-dir={tmp_path}/conf", "model=wide", "trainer.epochs=7", "run_dir=runs/a"])
    assert (config.model["width"], config.trainer.epochs, config.run_dir) == (512, 7, "runs/a")
    assert config.model["classes"] == config.dataset["classes"]  # interpolations are resolved
    assert lockstep.compose("model=mlp '+vars.sizes=[1, 2]'").vars == {"sizes": [1, 2]}
    (tmp_path / "own.yaml").write_text("number: 3\n")
    (tmp_path / "program.py").write_text(OWN_PROGRAM)
    assert python("program.py", "number=4").splitlines() == ["7", "4 program"]


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
result = lockstep.train([*overrides, "loader.validation=null", "hydra.run.dir=run"], ranks=2)
net = result.net()
print("net", type(net.net).__module__, len(net.predict(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))))
"""


def test_ranks_import_what_the_caller_can_and_a_net_of_ones_own_is_loaded(python, tmp_path, monkeypatch):
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "far.py").write_text(NET)
    (tmp_path / "beside.py").write_text("import torch\n\nclass Descent(torch.optim.SGD):\n    pass\n")
    (tmp_path / "script.py").write_text(OWN_SCRIPT)
    said = python("script.py")
    assert "rank 0 of 2" in said
    assert "net far 2" in said  # where nothing chooses, the last one
    monkeypatch.syspath_prepend(tmp_path / "nets")
    assert type(lockstep.load(tmp_path / "run").net).__module__ == "far"


def test_a_loop_of_ones_own_gives_the_numbers_of_the_command(python, tmp_path):
    """docs/examples/my_loop.py trains without the command line."""
    script = (ROOT / "docs" / "examples" / "my_loop.py").read_text()
    assert len(script.split("with join_world")[1].splitlines()) <= 15
    losses = [float(loss) for loss in re.findall(r"'loss': ([\d.]+)", python("-c", script))]
    options = ["model=mlp", "scheduler=constant", "trainer.epochs=3", BY_LOSS, "logger=[]", f"run_dir={tmp_path}/run"]
    (objective,) = in_world(1, train, composed(*options, whole=False))
    assert (len(losses), losses[-1]) == (3, pytest.approx(objective, rel=1e-4))
