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
from lockstep.distributed.world import OtherData, join_world, require_same_config, require_same_data
from lockstep.errors import ConfigError
from support.worlds import in_world

OPTIONS = {"timeout": 17, "socket_ifname": "lo", "debug": "WARN", "p2p_disable": True, "ib_disable": False}
VARIABLES = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "WARN",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_IB_DISABLE": "0",
}
SHARES = ([5], [4, 3], [0, 7], [5, 2, 0], [0, 1, 6])

CORES = cpu_count()


def _talk(folder: str) -> dict[str, Any]:
    with join_world("auto", **OPTIONS) as world:
        said: dict[str, Any] = {"place": (world.rank, world.size, world.local_rank, world.local_size)}
        said["gathered"] = world.all_gather_json([world.rank**2, "é" * 9 * world.rank, None])
        said["told"] = world.broadcast_json({"rank": world.rank + 7, "text": "é" * (9 * world.rank)})
        said["sum"] = world.all_reduce_sum(torch.tensor([1.0, world.rank])).tolist()
        later = torch.tensor([1.0, world.rank])
        wait = world.all_reduce_async(later)
        wait()
        said["sum later"] = later.tolist()
        said["any"] = world.any_of([world.rank == 1, world.rank == 0, False])
        world.store.set(f"rank {world.rank}", "here")
        said["stored"] = [world.store.get(f"rank {rank}").decode() for rank in range(world.size)]
        said["found"] = _found_after_one_download(world, Path(folder, "downloaded"))
        said["refused"] = _refusal_of_rank_zero(world)
        said["variables"] = {name: os.environ.get(name) for name in VARIABLES}
        said["threads"] = torch.get_num_threads()
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
        said["timeout"] = (world.timeout, backend.options._timeout.total_seconds())
        world.barrier()
    said["left"] = not dist.is_initialized()
    return said


def _found_after_one_download(world: Any, file: Path) -> bool:
    def download() -> None:
        time.sleep(0.3)
        file.open("x").close()  # "x": a second download would fail

    world.once_per_machine(download)
    return file.exists()


def _refusal_of_rank_zero(world: Any) -> str:
    def refuse() -> None:
        raise ConfigError(f"refused on rank {world.rank}")

    try:
        world.once_per_machine(refuse)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", [1, 2, 3])
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
            "left": True,
        }


def _differing() -> list[str]:
    said = []
    with join_world("gloo", 60) as world:
        seed = {"key": "the same", "seed": world.rank // 2}
        with_more = {"key": "the same"} | ({"more": 1} if world.rank == 1 else {})
        for config in (seed, with_more):
            with pytest.raises(ConfigError) as raised:
                require_same_config(world, config, config, hint="type the same seed")
            said.append(str(raised.value))
        secret = {"key": world.rank}
        with pytest.raises(ConfigError) as raised:
            require_same_config(world, secret, {"key": "***"}, hint="type the same key")
        said.append(str(raised.value))
        for length, fingerprint in ((5, "same"), (5 + world.rank // 2, "same"), (5, f"of {world.rank}")):
            try:
                require_same_data(world, "test data", length, fingerprint)
                said.append("same")
            except OtherData as error:
                said.append(f"{error.name}: {error}")
        require_same_config(world, {"key": [1, None]}, {"key": [1, None]}, hint="")
        world.barrier()
    return said


def test_other_configs_and_data_are_refused_on_all_ranks() -> None:
    copied = "copy the same data to every machine and type the command again"
    for said in in_world(3, _differing):
        assert said == [
            "seed differs between ranks: 0 on rank 0 and 1 on rank 2; type the same seed",
            "more differs between ranks: 'missing' on rank 0 and 1 on rank 1; type the same seed",
            "key differs between ranks: '***' on rank 0 and '***' on rank 1; type the same key",
            "same",
            f"test data: the test data has 6 samples on rank 2 and 5 on rank 0; {copied}",
            f"test data: the test data of rank 1 is not that of rank 0: as many samples, but other ones; {copied}",
        ]


def _losses(features: Tensor, others: Tensor, labels: Tensor, labels_of_others: Tensor) -> Tensor:
    """(n,): each sample is compared with all samples of the batch, `others` (N, C)."""
    distances = torch.cdist(features, others).square()
    same = labels[:, None] == labels_of_others
    return torch.where(same, distances, (-distances).exp()).sum(1)


def _contrastive(shares: list[int]) -> list[list[float]]:
    """The loss and the gradients of the weights, summed over the ranks: of own losses; of all, divided by the size; of
    one process."""
    torch.manual_seed(0)
    samples, labels = torch.randn(sum(shares), 6).double(), torch.arange(sum(shares)) % 3
    found = []
    with join_world("gloo", 60) as world:
        for way in ("own", "all", "one process"):
            weights = torch.linspace(-1, 1, 24).double().view(6, 4).requires_grad_()
            begin = sum(world.all_gather_json(shares[world.rank])[: world.rank])
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
            numbers = torch.cat([loss.detach().view(1), weights.grad.flatten()])
            found.append(world.all_reduce_sum(numbers).tolist())
        world.barrier()
    return found


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_a_loss_that_compares_all_samples_has_the_gradients_of_one_process(shares: list[int]) -> None:
    for own, whole, one_process in in_world(len(shares), _contrastive, shares):
        assert own == pytest.approx(one_process, rel=1e-12, abs=1e-12)
        assert whole == pytest.approx(one_process, rel=1e-12, abs=1e-12)


def _gathered_samples() -> list[Any]:
    with join_world("gloo", 60) as world:
        said: list[Any] = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
            rows = torch.full((world.rank, 2, 1), world.rank, dtype=dtype)
            found, _ = world.all_gather_samples(rows)
            said.append((found.dtype == dtype, found.flatten().tolist()))
        half = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
        world.all_gather_samples(half)[0].sum().backward()
        said.append(half.grad.tolist())  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="rows of several shapes or types"):
            world.all_gather_samples(torch.ones(1, 1 + world.rank))
        world.barrier()
    return said


def test_samples_of_any_type_are_gathered_in_the_order_of_ranks() -> None:
    for said in in_world(3, _gathered_samples):
        assert said == [*[(True, [1, 1, 2, 2, 2, 2])] * 5, [3.0]]


def _fail_on_rank_1() -> tuple[str, float] | None:
    began = time.monotonic()
    try:
        with join_world("gloo", 60) as world:
            world.barrier()  # gloo has connected all pairs: before that, the launcher ends who waits
            if world.rank == 1:
                raise ValueError("rank 1 gives up")
            world.barrier()
    except Exception as error:
        return type(error).__name__, time.monotonic() - began
    return None


def test_a_rank_that_fails_does_not_leave_the_others_waiting():
    (peer, waited), (failed, _), _ = in_world(3, _fail_on_rank_1)
    assert failed == "ValueError"
    assert peer == "RuntimeError"
    assert waited < 30  # not for the 60 s of the group


def _tensors_of(rank: int) -> dict[str, torch.Tensor]:
    return {
        "wide": torch.full((2, rank + 1), 0.1, dtype=torch.float64).t(),
        "mask": torch.tensor([True, False]),
        "half": torch.tensor(1.5 + rank, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
    }


def _gathered_tensors() -> list[bool]:
    """On rank 0: whether each rank's tensors arrived as they were sent."""
    with join_world("gloo", 60) as world:
        gathered = world.gather_tensors(_tensors_of(world.rank))
        pairs = [(found, _tensors_of(rank)) for rank, found in enumerate(gathered)]
        return [
            all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in sent.items())
            for found, sent in pairs
        ]


def test_tensors_are_gathered_bit_for_bit_on_rank_0():
    assert in_world(2, _gathered_tensors) == [[True, True], []]


def _set_variables(ranks_here: str) -> tuple[dict[str, str], list[str]]:
    os.environ["LOCAL_WORLD_SIZE"] = ranks_here
    with join_world("gloo", 60) as world:
        inside = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        world.barrier()  # a rank that leaves would end the other's connection while it is made
    return inside, [name for name in VARIABLES if name in os.environ]


def test_options_that_are_not_set_leave_the_environment_alone():
    """But for the interface, if the whole world is on this machine: gloo then listens at the loopback address."""
    interface = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert in_world(1, _set_variables, "1") == [(interface, [])]
    assert in_world(2, _set_variables, "1") == [({}, [])] * 2


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


def _place_with_a_virtual_local_rank() -> tuple[int, int]:
    os.environ["LOCAL_RANK"] = "0"
    with join_world("gloo", 60) as world:
        world.barrier()
        return world.local_rank, world.local_size


def test_ranks_count_themselves_where_torchrun_calls_each_of_them_the_first_of_its_machine():
    """torchrun --virtual-local-rank does: one that believed it would prepare the data beside the others."""
    assert in_world(2, _place_with_a_virtual_local_rank) == [(0, 2), (1, 2)]
