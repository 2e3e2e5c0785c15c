"""Which ranks look after each other: those of one machine that see each other's processes."""

import ctypes
import os
import socket
import tempfile

import pytest

from lockstep.distributed.watch import watch
from lockstep.distributed.world import join_world
from lockstep.failures.record import heartbeat
from support.worlds import in_world

CLONE_NEWUTS = 0x04000000


def _known_ranks(temporary: str, last_is_apart: bool) -> int:
    """How many ranks share the folder of this one; 0 without one."""
    tempfile.tempdir = temporary
    if last_is_apart and os.environ["RANK"] == "2":
        if ctypes.CDLL(None).unshare(CLONE_NEWUTS):
            return -1
        socket.sethostname("container")
    with join_world("gloo", 30) as world:
        watch(world, f"{temporary}/run", 30.0, "stop")
        world.barrier()
        return 0 if heartbeat.folder is None else len([*heartbeat.folder.glob("rank*.json")])


def test_ranks_of_one_machine_share_a_folder_that_the_last_one_removes(tmp_path):
    assert in_world(3, _known_ranks, str(tmp_path), False) == [3, 3, 3]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a namespace of its own")
def test_a_rank_in_a_container_of_its_own_is_left_alone(tmp_path):
    """Its pid means another process here."""
    assert in_world(3, _known_ranks, str(tmp_path), True) == [2, 2, 0]
    assert list(tmp_path.iterdir()) == []
