"""What ranks say to each other, and which options reach the process group."""

import os
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
from lockstep.distributed.world import join_world, require_same_config, require_same_data
from lockstep.errors import ConfigError
from support.worlds import in_world

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


def _refusals() -> list[str]:
    said = []
    with join_world("gloo", 60) as world:
        seed, secret = {"key": "the same", "seed": world.rank // 2}, {"key": world.rank}
        with_more = {"key": "the same"} | ({"more": 1} if world.rank == 1 else {})
        calls: list[tuple[Any, ...]] = [
            (require_same_config, seed, seed, "type the same"),
            (require_same_config, with_more, with_more, "type the same"),
            (require_same_config, secret, {"key": "***"}, "type the same"),
            (require_same_config, {"key": [1, None]}, {"key": [1, None]}, ""),
            (require_same_data, "test data", 5, "same"),
            (require_same_data, "test data", 5 + world.rank // 2, "same"),
            (require_same_data, "test data", 5, f"of {world.rank}"),
        ]
        for function, *arguments in calls:
            try:
                function(world, *arguments)
                said.append("same")
            except ConfigError as error:
                said.append(str(error).removesuffix("; copy the same data to every machine and type the command again"))
        world.barrier()
    return said


def test_other_configs_and_data_are_refused_on_all_ranks() -> None:
    for said in in_world(3, _refusals):
        assert said == [
            "seed differs between ranks: 0 on rank 0 and 1 on rank 2; type the same",
            "more differs between ranks: 'missing' on rank 0 and 1 on rank 1; type the same",
            "key differs between ranks: '***' on rank 0 and '***' on rank 1; type the same",
            "same",
            "same",
            "the test data has 6 samples on rank 2 and 5 on rank 0",
            "the test data of rank 1 is not that of rank 0: as many samples, but other ones",
        ]


def _losses(features: Tensor, others: Tensor, labels: Tensor, labels_of_others: Tensor) -> Tensor:
    """(n,): each sample is compared with all samples of the batch, `others` (N, C)."""
    distances = torch.cdist(features, others).square()
    same = labels[:, None] == labels_of_others
    return torch.where(same, distances, (-distances).exp()).sum(1)


def _contrastive(shares: list[int]) -> list[list[float]]:
    """The loss and the gradients of the weights, summed over the ranks: of own losses; of all, divided by the size; of
    one process. And the types in which rows of several types come."""
    torch.manual_seed(0)
    samples, labels = torch.randn(sum(shares), 6).double(), torch.arange(sum(shares)) % 3
    found = []
    with join_world("gloo", 60) as world:
        for way in ("own", "all", "one process"):
            weights = torch.linspace(-1, 1, 24).double().view(6, 4).requires_grad_()
            begin = sum(shares[: world.rank])
            mine = slice(begin, begin + shares[world.rank]) if way != "one process" else slice(None)
            features = (samples[mine] @ weights).tanh()
            if way == "one process":
                loss = _losses(features, features, labels, labels).sum() / world.size
            else:
                others, of_others = (world.all_gather_samples(own)[0] for own in (features, labels[mine]))
                assert torch.equal(of_others, labels)
                if way == "own":
                    loss = _losses(features, others, labels[mine], of_others).sum()
                else:
                    loss = _losses(others, others, labels, labels).sum() / world.size
            loss.backward()
            assert weights.grad is not None
            found.append(world.all_reduce_sum(torch.cat([loss.detach().view(1), weights.grad.flatten()])).tolist())
        for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.uint8):
            assert world.all_gather_samples(torch.ones(world.rank, 2, 1, dtype=dtype))[0].dtype == dtype
        if world.size > 1:
            with pytest.raises(ValueError, match="rows of several shapes or types"):
                world.all_gather_samples(torch.ones(1, 1 + world.rank))
        world.barrier()
    return found


@pytest.mark.parametrize("shares", [[5], [4, 3], [0, 7], [5, 2, 0]], ids=str)
def test_a_loss_that_compares_all_samples_has_the_gradients_of_one_process(shares: list[int]) -> None:
    for own, whole, one_process in in_world(len(shares), _contrastive, shares):
        assert own == pytest.approx(one_process, rel=1e-12, abs=1e-12)
        assert whole == pytest.approx(one_process, rel=1e-12, abs=1e-12)


def _interface(ranks_here: str) -> str | None:
    os.environ["LOCAL_WORLD_SIZE"] = ranks_here
    with join_world("gloo", 60) as world:
        world.barrier()  # a rank that leaves would end the other's connection while it is made
    return os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(("size", "interface"), [(1, "lo"), (2, None)])
def test_gloo_of_one_machine_takes_the_loopback_interface(size: int, interface: str | None) -> None:
    assert in_world(size, _interface, "1") == [interface] * size


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_without_gpus_auto_is_gloo_and_nccl_is_refused():
    ranks = RankInfo(world_size=4, local_world_size=4)
    assert choose_backend("auto", ranks) == "gloo"
    with pytest.raises(ConfigError, match="4 ranks on this machine but 0 GPUs; .* type backend=gloo"):
        choose_backend("nccl", ranks)


@pytest.mark.parametrize(
    ("typed", "ranks_on_cores", "said", "started_by", "expected"),
    [
        (None, 1, None, "python", CORES),
        (None, 2, None, "fork", max(1, CORES // 2)),
        (None, 1, None, "srun", CORES),  # each task has cores of its own
        (7, 2, "3", "python", 7),
        (None, 1, "3", "python", 3),
        (None, 1, "1", "torchrun", CORES),  # which sets it
    ],
)
def test_threads_of_a_rank(monkeypatch, typed, ranks_on_cores, said, started_by, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert number_of_threads(typed, ranks_on_cores, started_by) == expected
