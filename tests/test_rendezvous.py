"""Who describes a rank, and how: the environment of each starter as a table."""

import pytest

from conftest import in_world
from lockstep import rendezvous
from lockstep.refusal import Refusal

TORCHRUN = dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1", TORCHELASTIC_RUN_ID="x")
SRUN = dict(SLURM_JOB_ID="9", SLURM_STEP_NUM_TASKS="3", SLURM_PROCID="2", SLURM_LOCALID="0", SLURM_NODEID="1",
            SLURM_STEP_TASKS_PER_NODE="2,1", SLURM_STEP_NODELIST="gpu[07-08]")  # fmt: skip
MPIRUN = dict(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2")


@pytest.mark.parametrize(
    ("env", "starter", "place"),
    [
        ({}, "nobody", (0, 1, 0, 1)),
        (TORCHRUN, "torchrun", (3, 4, 1, 2)),
        (TORCHRUN | {"LOCAL_RANK": "0"}, "torchrun", (3, 4, 0, 2)),  # --virtual-local-rank: rank 3 is still not the main process
        (TORCHRUN | SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, "torchrun", (3, 4, 1, 2)),  # srun torchrun: the inner one counts
        ({"RANK": "1", "WORLD_SIZE": "2"}, "environment", (1, 2, 1, 2)),
        (SRUN, "srun", (2, 3, 0, 1)),
        ({"SLURM_JOB_ID": "9", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "nobody", (0, 1, 0, 1)),  # the batch script around srun
        (MPIRUN, "mpirun", (1, 2, 1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "mpirun", (1, 2, 1, 2)),
    ],
)
def test_reading_the_environment(env, starter, place):
    ranks = rendezvous.read(env)
    assert (ranks.starter, (ranks.rank, ranks.size, ranks.local_rank, ranks.local_size)) == (starter, place)


def test_slurm_ranks_meet_at_the_first_host():
    assert rendezvous.read(SRUN).master_addr == "gpu07"
    assert [rendezvous.first_host(nodes) for nodes in ("n1", "n[3,5-7]", "a1,b2", "gpu-[001-004],cpu1")] == ["n1", "n3", "a1", "gpu-001"]


@pytest.mark.parametrize("env", [{"RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
def test_half_a_description_is_refused(env):
    with pytest.raises(Refusal):
        rendezvous.read(env)


def test_mpirun_over_hosts_wants_an_address():
    with pytest.raises(Refusal, match="-x MASTER_ADDR="):
        rendezvous.read(MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def _meet_three_times():
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    ranks, totals = rendezvous.read(), []
    moment = rendezvous.started(ranks)  # first, as the door does: rank 0 takes the store with it when it leaves
    for _ in range(3):
        dist.init_process_group("gloo", store=rendezvous.meet(ranks, timedelta(seconds=30)), rank=ranks.rank, world_size=ranks.size)
        total = torch.ones(1)
        dist.all_reduce(total)
        totals.append(total.item())
        dist.destroy_process_group()
    return totals, moment.isoformat()


def test_ranks_meet_again_and_again_over_one_store_and_share_a_clock():
    answers = in_world(3, _meet_three_times)
    assert [totals for totals, _ in answers] == [[3.0] * 3] * 3
    assert len({moment for _, moment in answers}) == 1
