"""What ranks say to each other, their place in the world, their folder, and jobs of Slurm."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lockstep.distributed.environment import RankInfo, read_rank_info
from lockstep.distributed.host import usable_cores
from lockstep.distributed.run_folder import lock
from lockstep.distributed.world import choose_backend, join_world, number_of_threads, watch
from lockstep.errors import ConfigError
from lockstep.failures.record import heartbeat
from support.commands import TRAIN, wait_for
from support.configs import composed
from support.worlds import in_world, refusals

with suppress(ImportError):  # an extra, which a fork may have deleted with its tests
    from lockstep.launchers.slurm import SlurmLauncher

OPTIONS = {"timeout": 17, "socket_ifname": "lo", "debug": "WARN", "p2p_disable": True, "ib_disable": False}
VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
VARIABLES |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0"}
CORES = len(usable_cores())


def _talk(folder):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["LOCAL_RANK"] = "0"  # as torchrun --virtual-local-rank says to all: ranks count themselves
    with join_world("auto", **OPTIONS) as world:

        def download():
            time.sleep(0.3)
            Path(folder, "downloaded").open("x").close()  # "x": a second download would fail

        def refuse():
            raise ConfigError(f"refused on rank {rank}")

        assert (world.rank, world.size, world.local_rank, world.local_size) == (rank, size, rank, size)
        gathered = world.all_gather_json([rank**2, "é" * 9 * rank, None])
        assert gathered == [[of**2, "é" * 9 * of, None] for of in range(size)]
        assert world.broadcast_json({"rank": rank + 7, "text": "é" * (9 * rank)}) == {"rank": 7, "text": ""}
        later = torch.tensor([1.0, rank])
        assert world.all_reduce_sum(later.clone()).tolist() == [size, sum(range(size))]
        world.all_reduce_async(later)()
        assert later.tolist() == [size, sum(range(size))]
        assert world.any_of([rank == 1, rank == 0, False]) == [size > 1, True, False]
        world.store.set(f"rank {rank}", "here")
        assert {world.store.get(f"rank {of}") for of in range(size)} == {b"here"}
        world.once_per_machine(download)
        assert Path(folder, "downloaded").exists()
        with pytest.raises(ConfigError, match="^refused on rank 0$"):
            world.once_per_machine(refuse)
        assert {name: os.environ.get(name) for name in VARIABLES} == VARIABLES
        assert torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) // size)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert (world.timeout, backend.options._timeout.total_seconds()) == (17, 17.0)
        sent = {"wide": torch.full((2, rank + 1), 0.1, dtype=torch.float64).t(), "mask": torch.tensor([True])}
        found = [(one["wide"].shape, one["mask"].dtype) for one in world.gather_tensors(sent)]
        assert found == [((of + 1, 2), torch.bool) for of in range(size)] * (rank == 0)
        for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.uint8):
            rows, start = world.all_gather_samples(torch.full((rank, 2, 1), rank, dtype=dtype))
            assert rows.dtype == dtype
            assert (start, rows[:, 1, 0].tolist()) == (sum(range(rank)), [of for of in range(size) for _ in range(of)])
        if size > 1:
            with pytest.raises(ValueError, match="rows of several shapes or types"):
                world.all_gather_samples(torch.ones(1, 1 + rank))
        world.barrier()
    assert not dist.is_initialized()


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_speak(size, tmp_path):
    in_world(size, _talk, str(tmp_path))


def test_other_data_on_one_rank_is_refused_on_all(tmp_path):
    words, configs = ["model=mlp", "model.width=16", "logger=[]", "dataset=pair"], []
    for half in ("train", "test"):
        words += [f"dataset.{half}._target_=support.damage.digits_of_rank", f"+dataset.{half}.train={half == 'train'}"]
    for half, fault in (("train", "short"), ("train", "other"), ("test", "short"), ("test", "other")):
        options = [f"+dataset.{each}.{key}" for each in ("train", "test") for key in (f"half={half}", f"fault={fault}")]
        configs.append(composed(f"run_dir={tmp_path / half / fault}", *words, *options))
    for short, other, test_short, test_other in in_world(2, refusals, configs):
        found = {"training": (1437, (short, 1436), (other, 1437)), "test": (360, (test_short, 359), (test_other, 360))}
        for name, (count, *sentences) in found.items():
            for said, samples in sentences:
                assert said.startswith(f"the {name} data differs between ranks: '{count} samples, ")
                assert f" on rank 0 and '{samples} samples, " in said
                assert said.endswith(" on rank 1; copy the same data to every machine and type the command again")
    assert not list(tmp_path.glob("*/*/snapshots/*"))


def _known_ranks(temporary):
    """How many ranks share the folder of this one."""
    tempfile.tempdir = temporary
    with join_world("gloo", 30) as world:
        watch(world, f"{temporary}/run", 30.0, "stop")
        world.barrier()
        return len([*heartbeat.folder.glob("rank*.json")])


def test_ranks_of_one_machine_share_a_folder_that_the_last_one_removes(tmp_path):
    assert in_world(3, _known_ranks, str(tmp_path)) == [3, 3, 3]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_without_gpus_auto_is_gloo_and_nccl_is_refused():
    ranks = RankInfo(world_size=4, local_world_size=4)
    assert choose_backend("auto", ranks) == "gloo"
    with pytest.raises(ConfigError, match="4 ranks on this machine but 0 GPUs; .* type backend=gloo"):
        choose_backend("nccl", ranks)


def test_threads_of_a_rank(monkeypatch):
    for typed, ranks_on_cores, said, started_by, expected in (
        (None, 1, None, "python", CORES),
        (None, 2, None, "fork", max(1, CORES // 2)),
        (None, 1, None, "srun", CORES),  # each task has cores of its own
        (7, 2, "3", "python", 7),
        (None, 1, "3", "python", 3),
        (None, 1, "1", "torchrun", CORES),  # which sets it
    ):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if said is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert number_of_threads(typed, ranks_on_cores, started_by) == expected


LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", **LOCAL, "MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
STEP = {"STEP_NUM_TASKS": "3", "PROCID": "2", "LOCALID": "0", "NODEID": "1", "STEP_TASKS_PER_NODE": "2,1"}
SRUN = {f"SLURM_{name}": value for name, value in {"JOB_ID": "9", **STEP, "STEP_NODELIST": "gpu[07-08]"}.items()}
ONE = {"STEP_NUM_TASKS": "1", "PROCID": "0", "NODEID": "0", "STEP_TASKS_PER_NODE": "1"}
ONE_TASK = SRUN | {f"SLURM_{name}": value for name, value in ONE.items()}
PLACE = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
MPIRUN = {f"OMPI_COMM_WORLD_{name}": value for name, value in PLACE.items()}


@pytest.mark.parametrize(
    ("env", "started_by", "place"),
    [
        ({}, "python", (0, 1, 0, 1)),
        (TORCHRUN, "torchrun", (3, 4, 1, 2)),
        (TORCHRUN | {"LOCAL_RANK": "0"}, "torchrun", (3, 4, 0, 2)),  # --virtual-local-rank
        (TORCHRUN | SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, "torchrun", (3, 4, 1, 2)),  # srun torchrun
        (TORCHRUN | {"LOCKSTEP_STARTED_BY": "fork"}, "fork", (3, 4, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "environment", (1, 2, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0"}, "environment", (1, 2, 0, 1)),  # a container a rank
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "environment", (1, 2, 1, 2)),
        (SRUN, "srun", (2, 3, 0, 1)),
        ({"SLURM_JOB_ID": "9", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "python", (0, 1, 0, 1)),  # a batch script
        (MPIRUN, "mpirun", (1, 2, 1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "mpirun", (1, 2, 1, 2)),
        (ONE_TASK | MPIRUN, "mpirun", (1, 2, 1, 2)),  # mpirun in an srun step
        (ONE_TASK | {"PMI_RANK": "1", "PMI_SIZE": "2"}, "mpirun", (1, 2, 1, 2)),
        (SRUN | {"PMI_RANK": "2", "PMI_SIZE": "3"}, "srun", (2, 3, 0, 1)),  # srun --mpi=pmi2
        (SRUN | {"WORLD_SIZE": "3"}, "srun", (2, 3, 0, 1)),  # exported by the batch script
        (MPIRUN | {"RANK": "0"}, "mpirun", (1, 2, 1, 2)),
    ],
)
def test_each_starter_is_recognised(env, started_by, place):
    info = read_rank_info(env)
    assert info.started_by == started_by
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == place


@pytest.mark.parametrize(
    ("env", "address", "port"),
    [
        ({}, "", 0),  # a world of one opens no port
        (ONE_TASK, "gpu07", 0),  # nor do the runs in a shell of srun
        (TORCHRUN, "a", 1),
        (SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "7"}, "b", 7),
        (SRUN, "gpu07", read_rank_info(SRUN | {"SLURM_PROCID": "0"}).master_port),
        (SRUN | {"SLURM_STEP_NODELIST": "rack[0-1]_blade[0-3]-ib,cpu1", "MASTER_PORT": "7"}, "rack0_blade0-ib", 7),
        (SRUN | {"SLURM_STEP_NODELIST": "", "MASTER_PORT": "7"}, "127.0.0.1", 7),
    ],
)
def test_the_store_listens_where_the_starter_says(env, address, port):
    info = read_rank_info(env)
    assert (info.master_addr, info.master_port, info.agent_store) == (address, port, False)
    assert read_rank_info(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store


UNUSABLE = [
    ({"RANK": "1"}, "WORLD_SIZE= in the environment is not a whole number; type `unset RANK WORLD_SIZE`"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 does not fit WORLD_SIZE=2"),
    (TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK=x in the environment is not a whole number"),
    (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "-x MASTER_ADDR="),
]


def test_jobs_meet_at_ports_of_their_own_and_an_environment_that_cannot_be_used_is_refused():
    envs = [SRUN, SRUN | {"SLURM_JOB_ID": "10"}, MPIRUN]  # without a name of its job, a port of the parent process
    envs += [MPIRUN | {"OMPI_MCA_ess_base_jobid": "1"}, MPIRUN | {"PMIX_NAMESPACE": "2"}]
    assert len({read_rank_info(env).master_port for env in envs}) == len(envs)
    for env, said in UNUSABLE:
        with pytest.raises(ConfigError, match=said):
            read_rank_info(env)


def _hold_and_fork(folder):
    held = lock(Path(folder))
    assert not held.closed
    if (child := os.fork()) != 0:
        Path(folder, "worker").write_text(str(child))
        Path(folder, "worker").rename(Path(folder, "worker.pid"))
    time.sleep(60)
    os._exit(0)


def test_a_forked_worker_does_not_keep_the_lock_of_a_killed_rank(tmp_path):
    rank = multiprocessing.get_context("forkserver").Process(target=_hold_and_fork, args=[str(tmp_path)])
    rank.start()
    wait_for(lambda: (tmp_path / "worker.pid").exists(), "forked worker")
    worker = int((tmp_path / "worker.pid").read_text())
    try:
        with pytest.raises(ConfigError, match=rf"another run holds {tmp_path} \(pid {rank.pid} on "):
            lock(tmp_path)
        rank.kill()
        rank.join()
        assert Path(f"/proc/{worker}").exists()
        lock(tmp_path)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_is_trained_on(tmp_path, monkeypatch, caplog):
    def refuse(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock(tmp_path)
    assert "cannot be locked (Function not implemented)" in caplog.text


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """launcher(words of the command, overrides, **settings of launch), for the run folder `a folder`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    usual = {"nodes": 2, "ntasks_per_node": 1, "warning": 60, "options": [], "setup": [], "dry_run": False}
    usual |= dict.fromkeys(["cpus_per_task", "partition", "account", "time"]) | {"run_dir": "a folder"}

    def make(*words, overrides=(), **settings):
        hydra_cfg = OmegaConf.create({"overrides": {"task": list(overrides)}})
        monkeypatch.setattr(HydraConfig, "get", lambda: hydra_cfg)
        monkeypatch.setattr(sys, "argv", [TRAIN, *words])
        return SlurmLauncher(**(usual | settings))

    return make


def test_the_script_asks_for_what_the_config_says_and_no_more(launcher, tmp_path):
    asked = {"time": "00:30:00", "partition": "gpu", "account": "me", "warning": 90, "cpus_per_task": 4}
    text = launcher(**asked, options=["--gpus-per-node=2"], setup=["module load cuda", "ulimit -l"]).script()
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    options = ["--nodes=2", "--ntasks-per-node=1", "--signal=B:USR1@90", "--cpus-per-task=4", "--gpus-per-node=2"]
    options += ["--time=00:30:00", "--partition=gpu", "--account=me", "--requeue", f"--chdir={tmp_path}"]
    for line in (*options, f"--output='{tmp_path}/a folder/slurm-%j.out'"):
        assert f"#SBATCH {line}\n" in text
    assert "\nmodule load cuda\nulimit -l\n" in text
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=4 " in text  # srun ignores sbatch's
    plain = launcher().script()
    assert not [name for name in ("--time", "--partition", "--account", "--cpus-per-task") if name in plain]


HYDRAS = ["hydra.searchpath=[file:///my/conf]", "hydra/job_logging=none", "+hydra.verbose=true"]
OF_SWEEP = ["hydra.run.dir=x", "hydra.sweep.dir=y", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=2", "hydra.mode=RUN"]


# The words of the command, its overrides, and what reaches the ranks.
TYPED = [
    ([], ["model=mlp", "launch=slurm", "launch.nodes=2", "+launch.extra=1", "seed=3"], "model=mlp seed=3"),
    (["--config-dir=/my conf", "--config-name=a", "-m"], [], "'--config-dir=/my conf' --config-name=a"),
    ([*HYDRAS, *OF_SWEEP], ["seed=3"], f"'{HYDRAS[0]}' {HYDRAS[1]} {HYDRAS[2]} seed=3"),
]


def test_the_ranks_run_the_typed_command_with_launch_env_in_a_fixed_folder(launcher, tmp_path):
    for words, overrides, reach in TYPED:
        text = launcher(*words, overrides=overrides).script()
        (command,) = [line for line in text.splitlines() if line.startswith("srun ")]
        end = f"launch=env 'hydra.run.dir=\"{tmp_path}/a folder\"' &"
        assert command == f"srun --kill-on-bad-exit=1 {sys.executable} {TRAIN} {reach} {end}"


def test_a_submission_that_cannot_work_is_refused(launcher, tmp_path, monkeypatch):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match=r"sbatch refused the job \(invalid partition\); change launch"):
        launcher().launch(print)
    sbatch.write_text("#!/bin/sh\necho '12;cluster'\n")
    launcher(partition="gpu").launch(print)
    assert "--partition=gpu" in (tmp_path / "a folder/job.sh").read_text()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="finds no sbatch here; type launch.dry_run=true"):
        launcher().validate()
