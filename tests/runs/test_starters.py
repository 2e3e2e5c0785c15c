"""All starters give the same numbers to the printed digit, one run folder, one config and one curve.

Others, on several nodes and by Slurm, are drills.
"""

import pytest
import torch

from lockstep.models.tutorial import convnet
from support.commands import LAUNCHERS, PYTHON_TRAIN, TORCHRUN, TRAIN, WHOLE, Command, skip_without_mpirun
from support.event_files import scalars
from support.ports import free_port

# sync_bn=auto: nothing needs to be typed for equal numbers. In fp32 some CPUs differ in the last printed digit.
SHORT = ["trainer.epochs=2", "trainer.precision=fp64"]
pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run that all others must equal: one plain process."""
    return Command([*PYTHON_TRAIN, *WHOLE, *SHORT], tmp_path_factory.mktemp("alone")).finish()


def check_folder(run, ranks):
    folder = run.folder
    names = {path.name for path in folder.iterdir() if not path.name.startswith("events")}
    files = {".hydra", ".lock", "logs", "model.pt", "run.json", "snapshots", "test_samples.csv", "train.log"}
    assert names == files
    assert len([*folder.glob("events*")]) == 1
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [f"rank{rank}.log" for rank in range(ranks)]
    assert sorted(path.name for path in (folder / ".hydra").iterdir()) == ["config.yaml", "overrides.yaml"]
    assert "trainer.epochs=2" in (folder / ".hydra" / "overrides.yaml").read_text()
    assert not list(run.cwd.rglob("*.tmp"))


def test_one_process_leaves_everything(alone):
    check_folder(alone, 1)
    assert len(alone.epochs) == 2
    assert f"run folder: {alone.folder}" in alone.output
    assert f"tensorboard --logdir {alone.folder}" in alone.output
    # The trained net is a plain state dict with the tutorials' names, and the curves count optimizer steps.
    convnet([1, 8, 8], 10).load_state_dict(torch.load(alone.folder / "model.pt", weights_only=True))
    curves = scalars(alone.folder)
    for tag in ("train/loss", "train/accuracy", "test/loss", "test/accuracy", "speed/samples_per_s"):
        assert [step for step, _ in curves[tag]] == [23, 46], tag
    for tag in ("train/running_loss", "train/lr"):
        assert [step for step, _ in curves[tag]] == [10, 20, 30, 40], tag
    shown = f"train loss {curves['train/loss'][1][1]:.4f} accuracy {curves['train/accuracy'][1][1]:.4f}"
    assert shown in alone.epochs[1]


@pytest.mark.parametrize("starter", ["launch=spawn", "launch=fork", "mpirun"])
def test_two_ranks_of_any_starter_equal_one_process(start, alone, starter):
    skip_without_mpirun(starter)
    run = start(*LAUNCHERS[starter], *SHORT).finish()
    assert run.epochs == alone.epochs
    check_folder(run, 2)


def test_two_torchrun_agents_with_unequal_ranks(start, alone):
    agent = [*TORCHRUN, "--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    ranks = [["--node_rank=0", "--nproc_per_node=2"], ["--node_rank=1", "--nproc_per_node=1"]]
    first, second = (each.finish() for each in [start(*agent, *mine, TRAIN, *SHORT) for mine in ranks])
    assert first.epochs == alone.epochs
    assert not second.epochs
    check_folder(first, 3)
