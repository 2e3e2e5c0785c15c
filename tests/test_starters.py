"""Whoever starts the ranks: the same numbers to the printed digit, one run folder, one config, one curve."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from conftest import SHORT, TORCHRUN, TRAIN, events, free_port, wait_for

PYTHON = [sys.executable, TRAIN]
MPIRUN = ["mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", *PYTHON]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run that all others must equal: one plain process."""
    from conftest import Command

    return Command([*PYTHON, *SHORT], tmp_path_factory.mktemp("alone")).finish()


def check_folder(run, ranks):
    folder = run.folder
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith("events")) == [
        ".hydra", ".lock", "logs", "model.pt", "snapshots", "train.log"]  # fmt: skip
    assert len(list(folder.glob("events*"))) == 1
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [f"rank{rank}.log" for rank in range(ranks)]
    assert (folder / ".hydra" / "config.yaml").exists()
    assert not list(run.cwd.rglob("*.tmp"))


def test_one_process_finishes_well_and_leaves_everything(alone):
    check_folder(alone, 1)
    assert len(alone.epochs) == 2
    assert f"run folder: {alone.folder}" in alone.output
    assert f"tensorboard --logdir {alone.folder}" in alone.output


def test_the_trained_net_is_a_plain_state_dict_with_the_tutorials_names(alone):
    from lockstep.models import convnet

    saved = torch.load(alone.folder / "model.pt", weights_only=True)
    assert {"layer1.0.weight", "layer1.1.running_mean", "layer2.0.bias", "fc.weight", "fc.bias"} <= saved.keys()
    convnet([1, 8, 8], 10).load_state_dict(saved)


def test_the_curves_are_complete_and_count_optimizer_steps(alone):
    curves = events(alone.folder)
    for tag in ("train/loss", "train/accuracy", "test/loss", "test/accuracy", "speed/samples_per_s"):
        assert [step for step, _ in curves[tag]] == [23, 46], tag
    for tag in ("train/running_loss", "train/lr"):
        assert [step for step, _ in curves[tag]] == [10, 20, 30, 40], tag
    shown = f"train loss {curves['train/loss'][1][1]:.4f} accuracy {curves['train/accuracy'][1][1]:.4f}"
    assert shown in alone.epochs[1]


@pytest.mark.parametrize(
    "command",
    [
        [*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN, "backend=gloo"],
        [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", TRAIN],
        [*PYTHON, "launch=torchrun", "launch.nproc_per_node=2"],
        [*PYTHON, "launch=spawn", "launch.nproc_per_node=2"],
        [*PYTHON, "launch=fork", "launch.nproc_per_node=2"],
        pytest.param(MPIRUN, marks=pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed: apt-get install openmpi-bin")),
    ],
    ids=["torchrun", "torch.distributed.launch", "launch=torchrun", "launch=spawn", "launch=fork", "mpirun"],
)
def test_two_ranks_of_any_starter_equal_one_process(start, alone, command):
    run = start(*command, *SHORT).finish()
    assert run.epochs == alone.epochs
    check_folder(run, 2)


@pytest.mark.drill
@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed: apt-get install openmpi-bin")
def test_mpirun_ends_all_ranks_when_one_is_killed(start):
    run = start(*MPIRUN, "hydra.run.dir=run", "trainer.epochs=300")
    log, lock = run.cwd / "run" / "train.log", run.cwd / "run" / ".lock"
    wait_for(lambda: log.exists() and "epoch 1/" in log.read_text(), "training")
    leader = int(lock.read_text().split()[1])
    group = [int(pid) for pid in subprocess.run(["pgrep", "-P", str(run.process.pid)], capture_output=True, text=True).stdout.split()]
    assert leader in group
    os.kill(leader, signal.SIGKILL)
    assert run.finish(None).process.returncode not in (0, 75)
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in group), "end of the other rank", 5)


@pytest.mark.parametrize("launch", ["torchrun", "fork"])
def test_a_killed_launcher_takes_its_ranks_and_their_fork_server_along(start, launch):
    run = start(*PYTHON, f"launch={launch}", "hydra.run.dir=run", "trainer.epochs=1000")
    log = run.cwd / "run" / "train.log"
    wait_for(lambda: log.exists() and "epoch 1/" in log.read_text(), "training")
    os.kill(run.process.pid, signal.SIGKILL)
    run.finish(-signal.SIGKILL)  # its output ends when the last process that holds it has ended
    assert "stopped early at step" in log.read_text()


def test_spawn_on_two_nodes_shares_one_folder(start, alone):
    port = free_port()
    nodes = [start(*PYTHON, "launch=spawn", "launch.nproc_per_node=1", "launch.nnodes=2", f"launch.node_rank={rank}",
                   f"launch.master_port={port}", *SHORT) for rank in (1, 0)]  # fmt: skip
    follower, leader = (node.finish() for node in nodes)
    assert leader.epochs == alone.epochs
    assert not follower.epochs
    check_folder(leader, 2)


def test_two_torchrun_agents_with_unequal_ranks(start, alone):
    port = free_port()
    agents = [start(*TORCHRUN, "--nnodes=2", f"--node_rank={rank}", f"--nproc_per_node={2 - rank}", "--master_addr=127.0.0.1",
                    f"--master_port={port}", TRAIN, *SHORT) for rank in (0, 1)]  # fmt: skip
    leader, follower = (agent.finish() for agent in agents)
    assert leader.epochs == alone.epochs
    assert not follower.epochs
    check_folder(leader, 3)


def test_ranks_described_by_srun_that_start_seconds_apart(start, alone):
    slurm = dict(SLURM_JOB_ID=os.getpid(), SLURM_STEP_ID=0, SLURM_STEP_NUM_TASKS=2, SLURM_NODEID=0,
                 SLURM_STEP_TASKS_PER_NODE=2, SLURM_STEP_NODELIST="localhost")  # fmt: skip
    import time

    follower = start(*PYTHON, *SHORT, **slurm, SLURM_PROCID=1, SLURM_LOCALID=1)
    time.sleep(2.5)  # ${now:} would give each rank a folder of its own
    leader = start(*PYTHON, *SHORT, **slurm, SLURM_PROCID=0, SLURM_LOCALID=0).finish()
    follower.finish()
    assert leader.epochs == alone.epochs
    check_folder(leader, 2)


@pytest.mark.parametrize("launch", ["torchrun", "fork"])
def test_a_sweep_of_one_parent_gives_each_job_fresh_ranks(start, launch):
    run = start(*PYTHON, "-m", f"launch={launch}", "optimizer.lr=0.1,0.01", *SHORT).finish()
    assert len(run.epochs) == 4
    jobs = sorted(run.cwd.glob("outputs/multirun/*/*/[0-9]"))
    assert [len(list(job.glob("events*"))) for job in jobs] == [1, 1]
    assert run.output.count("rank 0 of 2") == 2


def test_a_failed_job_of_a_sweep_under_torchrun_harms_no_other(start):
    run = start(*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN, "-m", "optimizer.lr=0.1,-1,0.01", *SHORT).finish(1)
    assert "Invalid learning rate: -1" in run.output
    jobs = sorted(run.cwd.glob("outputs/multirun/*/*/[0-9]"))
    assert [(job / "model.pt").exists() for job in jobs] == [True, False, True]
    assert all((job / ".hydra").is_dir() for job in jobs)
    assert "Invalid learning rate: -1" in (jobs[1] / "logs" / "rank1.log").read_text()


def test_asking_for_help_answers_at_once_and_without_torch(start):
    import time

    for question in (["--help"], ["--cfg", "job"], ["--info", "defaults"]):
        began = time.monotonic()
        answer = start(sys.executable, "-X", "importtime", TRAIN, *question).finish().output
        assert time.monotonic() - began < 3  # half a second on an idle machine
        assert not re.search(r"\|\s+torch$", answer, re.MULTILINE)
        assert "hydra" in answer
    assert not (answer and list(start(sys.executable, TRAIN, "--help").finish().cwd.glob("outputs")))


def test_a_run_that_compiles_nothing_does_not_import_the_compiler(start):
    imported = start(sys.executable, "-X", "importtime", TRAIN, "trainer.max_steps=1").finish().output
    modules = [line.split()[-1] for line in imported.splitlines() if line.startswith("import time")]
    assert "torch" in modules
    assert not [module for module in modules if module.startswith(("torch._dynamo", "torch._inductor"))]


def test_help_shows_three_commands(train):
    text = train("--help").output
    for command in ("python src/train.py", "torchrun --standalone", "src/train.py -m launch=torchrun"):
        assert command in text
