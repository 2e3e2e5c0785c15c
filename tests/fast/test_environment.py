"""A rank's place in the world, as the environment of each starter describes it."""

import pytest

from lockstep.distributed.environment import first_host, node_rank_info, read_rank_info
from lockstep.errors import ConfigError
from lockstep.launchers.base import refuse_nesting

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "x",
}
SRUN = {
    "SLURM_JOB_ID": "9",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ONE_TASK = SRUN | {
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


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
    assert (info.started_by, (info.rank, info.world_size, info.local_rank, info.local_world_size)) == (
        started_by,
        place,
    )
    assert info.is_rank_zero == (place[0] == 0)


def test_the_store_listens_where_the_starter_says():
    assert (read_rank_info(TORCHRUN).master_addr, read_rank_info(TORCHRUN).master_port) == ("a", 1)
    assert read_rank_info({}).master_port == 0  # a world of one opens no port
    assert read_rank_info(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store
    assert not read_rank_info(TORCHRUN).agent_store


def test_slurm_ranks_meet_at_the_first_host_and_at_a_port_of_their_own_step():
    info = read_rank_info(SRUN)
    assert info.master_addr == "gpu07"
    assert info.master_port == read_rank_info(SRUN | {"SLURM_PROCID": "0"}).master_port
    assert info.master_port != read_rank_info(SRUN | {"SLURM_JOB_ID": "10"}).master_port
    assert read_rank_info(SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "7"}).master_port == 7


def test_runs_in_a_shell_of_srun_share_no_port_and_may_start_ranks(monkeypatch):
    assert read_rank_info(ONE_TASK).master_port == 0
    for name, value in ONE_TASK.items():
        monkeypatch.setenv(name, value)
    refuse_nesting()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ConfigError, match="a launcher inside srun .* type launch=env"):
        refuse_nesting()


def test_mpi_ranks_behind_a_script_meet_at_a_port_of_their_job():
    ports = {
        read_rank_info(MPIRUN | {name: job}).master_port
        for name in ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")
        for job in ("job-1", "job-2")
    }
    assert len(ports) == 2
    assert read_rank_info(MPIRUN).master_port not in ports  # of the parent process, which the script would be


def test_the_first_host_of_a_slurm_node_list():
    lists = ("n1", "n[3,5-7]", "a1,b2", "gpu-[001-004],cpu1", "")
    assert [first_host(nodes) for nodes in lists] == ["n1", "n3", "a1", "gpu-001", "127.0.0.1"]
    assert first_host("rack[0-1]_blade[0-3],cpu1") == "rack0_blade0"
    assert first_host("node[1-3]-ib,node[7]-ib") == "node1-ib"


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


def test_nodes_of_a_spawned_world_have_a_number_each():
    with pytest.raises(
        ConfigError, match="launch.node_rank=2 does not fit launch.nnodes=2; type launch.node_rank=0 to 1"
    ):
        node_rank_info(2, 2, "127.0.0.1", 29500)
