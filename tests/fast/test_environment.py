"""A rank's place in the world, as the environment of each starter describes it."""

import pytest

from lockstep.distributed.environment import read_rank_info
from lockstep.errors import ConfigError
from lockstep.launchers.base import refuse_nesting

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
    assert info.is_rank_zero == (place[0] == 0)


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


def test_jobs_meet_at_ports_of_their_own():
    envs = [SRUN, SRUN | {"SLURM_JOB_ID": "10"}, MPIRUN]  # without a name of its job, a port of the parent process
    envs += [MPIRUN | {"OMPI_MCA_ess_base_jobid": "1"}, MPIRUN | {"PMIX_NAMESPACE": "2"}]
    assert len({read_rank_info(env).master_port for env in envs}) == len(envs)


def test_ranks_of_another_program_start_none_and_a_shell_of_srun_does(monkeypatch):
    for name, value in ONE_TASK.items():
        monkeypatch.setenv(name, value)
    refuse_nesting()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ConfigError, match="a launcher inside srun .* type launch=env"):
        refuse_nesting()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "1"}, "WORLD_SIZE= in the environment is not a whole number; type `unset RANK WORLD_SIZE`"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 does not fit WORLD_SIZE=2"),
        ({"RANK": "abc", "WORLD_SIZE": "2"}, "RANK=abc in the environment is not a whole number; type `unset RANK"),
        (TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK=x in the environment is not a whole number"),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "-x MASTER_ADDR="),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused(env, said):
    with pytest.raises(ConfigError, match=said):
        read_rank_info(env)
