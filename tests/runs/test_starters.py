"""All starters give the same numbers to the printed digit, one run folder, one config and one curve."""

import os
import time

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
def alone(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The run that all others must equal: one plain process."""
    return Command([*PYTHON_TRAIN, *WHOLE, *SHORT], tmp_path_factory.mktemp("alone"), new_process=True).finish()


def check_folder(run: Command, ranks: int) -> None:
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


@pytest.mark.new_process
@pytest.mark.parametrize("starter", ["torchrun", "launch=spawn", "launch=fork", "mpirun"])
def test_two_ranks_of_any_starter_equal_one_process(start, alone, starter):
    skip_without_mpirun(starter)
    run = start(*LAUNCHERS[starter], *SHORT).finish()
    assert run.epochs == alone.epochs
    check_folder(run, 2)


def check_two_nodes(nodes: list[Command], alone: Command, ranks: int) -> None:
    """nodes: the commands of both nodes, that of rank 0 first."""
    first, second = (node.finish() for node in nodes)
    assert first.epochs == alone.epochs
    assert not second.epochs
    check_folder(first, ranks)


def test_launch_spawn_on_two_nodes_shares_one_folder(start, alone):
    spawn = ["launch=spawn", "launch.nproc_per_node=1", "launch.nnodes=2", f"launch.master_port={free_port()}"]
    nodes = [start(*PYTHON_TRAIN, *spawn, f"launch.node_rank={rank}", *SHORT) for rank in (1, 0)]
    check_two_nodes(nodes[::-1], alone, 2)


def test_two_torchrun_agents_with_unequal_ranks(start, alone):
    agent = [*TORCHRUN, "--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    ranks = [["--node_rank=0", "--nproc_per_node=2"], ["--node_rank=1", "--nproc_per_node=1"]]
    check_two_nodes([start(*agent, *mine, TRAIN, *SHORT) for mine in ranks], alone, 3)


def test_ranks_described_by_srun_that_start_seconds_apart(start, alone):
    step = {"JOB_ID": os.getpid(), "STEP_ID": 0, "STEP_NUM_TASKS": 2, "NODEID": 0, "STEP_TASKS_PER_NODE": 2}
    nodes = []
    for rank in (1, 0):
        task = step | {"STEP_NODELIST": "localhost", "PROCID": rank, "LOCALID": rank}
        nodes.append(start(*PYTHON_TRAIN, *SHORT, **{f"SLURM_{name}": value for name, value in task.items()}))
        time.sleep(2.5 * rank)  # ${now:} would give each rank a folder of its own
    check_two_nodes(nodes[::-1], alone, 2)


def test_a_sweep_of_one_parent_gives_each_job_fresh_ranks(start, alone):
    run = start(*PYTHON_TRAIN, "-m", "launch=torchrun", "optimizer.lr=0.1,0.05", *SHORT).finish()
    assert len(run.epochs) == 4
    assert run.epochs[2:] == alone.epochs  # the second job is as if it ran alone
    jobs = sorted(run.cwd.glob("outputs/multirun/*/*/*=*"))
    assert [len(list(job.glob("events.out.tfevents.[1-9]*"))) for job in jobs] == [1, 1]
    assert run.output.count("rank 0 of 2") == 2
