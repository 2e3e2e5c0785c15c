"""What ranks say to each other, which options reach the process group, and what ranks must have alike."""

import ctypes
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.backend import choose_backend, number_of_threads
from lockstep.distributed.environment import RankInfo
from lockstep.distributed.host import cpu_count
from lockstep.distributed.watch import watch
from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from lockstep.failures.record import heartbeat
from support.configs import composed
from support.worlds import in_world, refusals

OPTIONS = {"timeout": 17, "socket_ifname": "lo", "debug": "WARN", "p2p_disable": True, "ib_disable": False}
VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
VARIABLES |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0"}
CORES = cpu_count()


def _talk(folder: str) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = "0"  # as torchrun --virtual-local-rank says to all: ranks count themselves
    with join_world("auto", **OPTIONS) as world:

        def download() -> None:
            time.sleep(0.3)
            Path(folder, "downloaded").open("x").close()  # "x": a second download would fail

        def refuse() -> None:
            raise ConfigError(f"refused on rank {world.rank}")

        said: dict[str, Any] = {"place": (world.rank, world.size, world.local_rank, world.local_size)}
        said["gathered"] = world.all_gather_json([world.rank**2, "é" * 9 * world.rank, None])
        said["told"] = world.broadcast_json({"rank": world.rank + 7, "text": "é" * (9 * world.rank)})
        said["sum"] = world.all_reduce_sum(torch.tensor([1.0, world.rank])).tolist()
        later = torch.tensor([1.0, world.rank])
        world.all_reduce_async(later)()
        said["sum later"] = later.tolist()
        said["any"] = world.any_of([world.rank == 1, world.rank == 0, False])
        world.store.set(f"rank {world.rank}", "here")
        said["stored"] = [world.store.get(f"rank {rank}").decode() for rank in range(world.size)]
        world.once_per_machine(download)
        said["found"] = Path(folder, "downloaded").exists()
        with pytest.raises(ConfigError) as refused:
            world.once_per_machine(refuse)
        said["refused"] = str(refused.value)
        said["variables"] = {name: os.environ.get(name) for name in VARIABLES}
        said["threads"] = torch.get_num_threads()
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
        said["timeout"] = (world.timeout, backend.options._timeout.total_seconds())
        sent = {"wide": torch.full((2, world.rank + 1), 0.1, dtype=torch.float64).t(), "mask": torch.tensor([True])}
        said["tensors"] = [(found["wide"].shape, found["mask"].dtype) for found in world.gather_tensors(sent)]
        world.barrier()
    said["left"] = not dist.is_initialized()
    return said


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_speak(size: int, tmp_path: Path) -> None:
    for rank, said in enumerate(in_world(size, _talk, str(tmp_path))):
        assert said == {
            "place": (rank, size, rank, size),
            "gathered": [[0, "", None], [1, "é" * 9, None], [4, "é" * 18, None]][:size],
            "told": {"rank": 7, "text": ""},
            "sum": [size, sum(range(size))],
            "sum later": [size, sum(range(size))],
            "any": [size > 1, True, False],
            "stored": ["here"] * size,
            "found": True,  # the first rank of the machine downloaded it, alone
            "refused": "refused on rank 0",
            "variables": VARIABLES,
            "threads": max(1, len(os.sched_getaffinity(0)) // size),
            "timeout": (17, 17.0),
            "tensors": [((of + 1, 2), torch.bool) for of in range(size)] if rank == 0 else [],
            "left": True,
        }


def test_other_data_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    words, configs = ["model=mlp", "model.width=16", "logger=[]", "dataset=pair"], []
    for half in ("train", "test"):
        words += [f"dataset.{half}._target_=support.damage.digits_of_rank", f"+dataset.{half}.train={half == 'train'}"]
    for half, fault in (("train", "short"), ("train", "other"), ("test", "short"), ("test", "other")):
        options = [f"+dataset.{each}.{key}" for each in ("train", "test") for key in (f"half={half}", f"fault={fault}")]
        configs.append(composed(f"run_dir={tmp_path / half / fault}", *words, *options))
    for short, other, test_short, test_other in in_world(2, refusals, configs):
        assert short.startswith("the training data has 1436 samples on rank 1 and 1437 on rank 0; copy the same data")
        assert other.startswith("the training data of rank 1 is not that of rank 0: as many samples, but other ones")
        assert test_short.startswith("the test data has 359 samples on rank 1 and 360 on rank 0; copy the same data")
        assert test_other.startswith("the test data of rank 1 is not that of rank 0")
    assert not list(tmp_path.glob("*/*/snapshots/*"))


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


@pytest.mark.parametrize("last_is_apart", [False, True])
def test_ranks_of_one_machine_share_a_folder_that_the_last_one_removes(tmp_path: Path, last_is_apart: bool) -> None:
    """A rank in a container of its own is left alone: its pid means another process here."""
    if last_is_apart and os.geteuid():
        pytest.skip("needs root, for a namespace of its own")
    assert in_world(3, _known_ranks, str(tmp_path), last_is_apart) == ([2, 2, 0] if last_is_apart else [3, 3, 3])
    assert list(tmp_path.iterdir()) == []


def _losses(features: Tensor, others: Tensor, labels: Tensor, labels_of_others: Tensor) -> Tensor:
    """(n,): each sample is compared with all samples of the batch, `others` (N, C)."""
    distances = torch.cdist(features, others).square()
    same = labels[:, None] == labels_of_others
    return torch.where(same, distances, (-distances).exp()).sum(1)


def _contrastive(shares: list[int]) -> list[list[float]]:
    """The loss and the gradients of the weights, summed over the ranks: of own samples, and of one process."""
    torch.manual_seed(0)
    samples, labels = torch.randn(sum(shares), 6).double(), torch.arange(sum(shares)) % 3
    found = []
    with join_world("gloo", 60) as world:
        begin = sum(shares[: world.rank])
        for mine in (slice(begin, begin + shares[world.rank]), slice(None)):
            weights = torch.linspace(-1, 1, 24).double().view(6, 4).requires_grad_()
            features = (samples[mine] @ weights).tanh()
            if mine == slice(None):
                loss = _losses(features, features, labels, labels).sum() / world.size
            else:
                others, of_others = (world.all_gather_samples(own)[0] for own in (features, labels[mine]))
                loss = _losses(features, others, labels[mine], of_others).sum()
            loss.backward()
            found.append(world.all_reduce_sum(torch.cat([loss.detach().view(1), weights.grad.flatten()])).tolist())
        for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.uint8):
            assert world.all_gather_samples(torch.ones(world.rank, 2, 1, dtype=dtype))[0].dtype == dtype
        if world.size > 1:
            with pytest.raises(ValueError, match="rows of several shapes or types"):
                world.all_gather_samples(torch.ones(1, 1 + world.rank))
        world.barrier()
    return found


@pytest.mark.parametrize("shares", [[5], [0, 7], [5, 2, 0]], ids=str)
def test_a_loss_that_compares_all_samples_has_the_gradients_of_one_process(shares: list[int]) -> None:
    for own, one_process in in_world(len(shares), _contrastive, shares):
        assert own == pytest.approx(one_process, rel=1e-12, abs=1e-12)


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
