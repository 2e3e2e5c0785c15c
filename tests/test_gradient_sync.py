"""Ways of averaging gradients: they agree to rounding, send the bytes their textbooks say, and survive a restart."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from conftest import ROOT, TORCHRUN, TRAIN, events, in_world, wait_for
from lockstep import entry, snapshot
from lockstep.refusal import Refusal
from lockstep.shared_memory import SharedSum
from test_configs import composed
from test_resume import children, cmdline, model, same_bits
from test_same_numbers import drift, weights

sys.path.insert(0, str(ROOT / "bench"))

LENGTHS = [0, 1, 2, 3, 4, 5, 6, 7, 11, 64, 1000, 4097]


def _sums(name):
    """For each length: the vector's bits as `name` leaves it, and how far they are from an all-reduce's."""
    import torch.distributed as dist

    from lockstep import gradient_sync, world

    with world.join("gloo", 60) as ranks:
        found = []
        for length in LENGTHS:
            vector = torch.randn(length, dtype=torch.double, generator=torch.Generator().manual_seed(100 * length + ranks.rank))
            expected = vector.clone()
            add_up = SharedSum(ranks, 5000, torch.double) if name == "shared_memory" else getattr(gradient_sync, name)
            add_up(vector, ranks.rank, ranks.size)
            dist.all_reduce(expected)
            found.append((hashlib.sha256(vector.numpy().tobytes()).hexdigest(), (vector - expected).norm().item()))
        return found


@pytest.mark.parametrize("name", ["ring_sum", "server_sum", "shared_memory"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_sum_is_the_all_reduce_of_any_vector_with_the_same_bits_on_every_rank(name, size):
    first, *others = in_world(size, _sums, name)
    assert all(other == first for other in others)
    assert all(distance <= 1e-12 for _, distance in first)


def _bytes(name, length):
    """(bytes handed to the sends, bytes that left by TCP) of one sum on this rank."""
    import compare

    from lockstep import gradient_sync, world

    handed, sending = 0, gradient_sync.P2POp

    def counted(operation, tensor, peer):
        nonlocal handed
        handed += tensor.nbytes if operation is gradient_sync.isend else 0
        return sending(operation, tensor, peer)

    gradient_sync.P2POp = counted
    with world.join("gloo", 60) as ranks:
        vector = torch.ones(length)
        getattr(gradient_sync, name)(vector, ranks.rank, ranks.size)  # connects those who speak
        ranks.barrier()
        handed, before = 0, compare.bytes_sent()
        getattr(gradient_sync, name)(vector, ranks.rank, ranks.size)
        left = compare.bytes_sent() - before
        ranks.barrier()  # who leaves earlier would speak of it
        return handed, left


@pytest.mark.parametrize(("size", "length"), [(2, 2), (2, 250_000), (3, 3000), (4, 100_000)])
def test_the_bytes_sent_are_the_formulas(size, length):
    whole = 4 * length
    for rank, (handed, left) in enumerate(in_world(size, _bytes, "ring_sum", length)):
        assert handed == 2 * (size - 1) * whole // size, rank
        assert 0 <= left - handed < 200 * 2 * (size - 1) * 2  # gloo's headers: each message's, and who is ready
    for rank, (handed, left) in enumerate(in_world(size, _bytes, "server_sum", length)):
        assert handed == ((size - 1) * whole if rank == 0 else whole), rank
        assert 0 <= left - handed < 200 * (size - 1) * 2


def test_topologies_end_in_the_same_weights_with_many_buckets(tmp_path):
    same = ["trainer.precision=fp64", "model=mlp", "trainer.accumulate=2", "trainer.epochs=1", "strategy.bucket_cap_mb=0.01"]
    plain = weights(3, tmp_path / "all_reduce", *same)
    for option in ("ring", "parameter_server", "shared_memory"):
        assert drift(plain, weights(3, tmp_path / option, *same, f"gradient_sync={option}")) <= 1e-12


@pytest.mark.parametrize("option", ["fp16", "bf16", "powersgd", "local_sgd"])
def test_approximations_train_on_two_ranks_with_many_buckets(tmp_path, option):
    few = ["gradient_sync.after=3"] if option == "powersgd" else []
    run = ["model=mlp", "strategy.bucket_cap_mb=0.01", "trainer.log_every=1"]
    plain, approximate = weights(2, tmp_path / "plain", *run), weights(2, tmp_path / option, *run, f"gradient_sync={option}", *few)
    assert 0 < drift(plain, approximate) < 0.5
    assert events(tmp_path / option)["test/accuracy"][-1][1] > 0.85


def _a_rank_that_leaves():
    from lockstep import world

    with world.join("gloo", 60) as ranks:
        add_up, vector = SharedSum(ranks, 4, torch.float32), torch.ones(4)
        add_up(vector, ranks.rank, ranks.size)
        if ranks.leads:
            for pipe in (*add_up.told, *add_up.heard):
                os.close(pipe)
            return None
        with pytest.raises(ConnectionError) as error:
            add_up(vector, ranks.rank, ranks.size)
        return vector.tolist()[0], str(error.value), not list(Path("/dev/shm").glob("lockstep-*"))


def test_ranks_that_share_memory_notice_at_once_that_one_is_gone_and_leave_nothing_behind():
    _, (total, said, clean) = in_world(2, _a_rank_that_leaves)
    assert total == 2
    assert said == "rank 0 is gone: closed by peer"
    assert clean


def test_a_world_of_one_has_nothing_to_hook(tmp_path):
    few = ["model=mlp", "trainer.max_steps=3"]
    assert torch.equal(weights(1, tmp_path / "plain", *few), weights(1, tmp_path / "ring", *few, "gradient_sync=ring"))


def test_local_sgd_killed_and_resumed_ends_with_the_bits_of_an_unbroken_run(tmp_path):
    apart = ["gradient_sync=local_sgd", "gradient_sync.every=5", "model=mlp", "optimizer=adamw", "trainer.ema=0.9", "trainer.save_every=7steps"]
    weights(2, tmp_path / "whole", *apart)
    weights(2, tmp_path / "resumed", *apart, f"resume={tmp_path}/whole/snapshots/step_00000035.pt")
    assert same_bits(model(tmp_path / "whole"), model(tmp_path / "resumed"))


def test_an_asynchronous_server_applies_stale_gradients_and_learns(start):
    run = start(*TORCHRUN, "--standalone", "--nproc_per_node=3", TRAIN, "strategy=async_parameter_server", "optimizer.momentum=0.5").finish()
    shown = events(run.folder)
    assert all(0 < value <= 10 for _, value in shown["async/staleness_mean"])
    assert max(value for _, value in shown["async/staleness_max"]) >= 1
    assert shown["test/accuracy"][-1][1] > 0.85
    assert [step for step, _ in shown["train/loss"]] == [23, 46, 69, 92, 115]  # the steps of a synchronous run
    assert shown["test/accuracy"][-1][1] * 360 == pytest.approx(round(shown["test/accuracy"][-1][1] * 360), abs=1e-3)  # of 360 test samples


def test_with_one_worker_an_asynchronous_server_is_one_process_stopped_in_mid_epoch_or_not(tmp_path):
    same = ["trainer.precision=fp64", "optimizer=adamw", "trainer.ema=0.9", "trainer.accumulate=2", "dataset.augment.pad=1", "scheduler=constant"]
    served = ["strategy=async_parameter_server", "loop.meet_every=9", *same]
    weights(2, tmp_path / "served", *served, "trainer.max_steps=30")
    assert drift(weights(1, tmp_path / "alone", *same), weights(2, tmp_path / "served", *served)) < 1e-9
    assert {value for _, value in events(tmp_path / "served")["async/staleness_max"]} == {0.0}


@pytest.mark.drill
@pytest.mark.parametrize("who", [0, 2])
def test_an_asynchronous_world_asked_to_stop_or_killed_goes_on(start, tmp_path, who):
    slow = ["strategy=async_parameter_server", "model=mlp", "model.width=1024", "trainer.batch_size=16", "loop.meet_every=20", "hydra.run.dir=run"]
    torchrun = [*TORCHRUN, "--standalone", "--nproc_per_node=3", "--max-restarts=1", TRAIN, *slow]
    run = start(*torchrun, "trainer.epochs=100")
    wait_for(lambda: list(tmp_path.glob("run/snapshots/step_*.pt")), "snapshot")
    os.kill(ours(run.process.pid)[who], signal.SIGKILL)
    wait_for(lambda: "resumed from" in (tmp_path / "run" / "train.log").read_text(), "restart")
    time.sleep(1)
    os.kill(ours(run.process.pid)[who], signal.SIGTERM)
    run.finish(None)
    assert "stopped early at step " in (tmp_path / "run" / "train.log").read_text()
    step = json.loads(snapshot.complete(tmp_path / "run" / "snapshots")[0].with_suffix(".json").read_text())["step"]
    start(*torchrun, f"trainer.max_steps={step + 10}", "trainer.epochs=100").finish()


def ours(launcher):
    return sorted(pid for pid in children(launcher) if b"train.py" in cmdline(pid))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["gradient_sync=ring", "strategy=shards"], "type strategy=ddp gradient_sync=ring"),
        (["gradient_sync=local_sgd", "trainer.precision=fp16"], "type trainer.precision=bf16"),
        (["loop=asynchronous"], "loop=asynchronous is strategy=async_parameter_server's"),
        (["strategy=async_parameter_server", "sync_bn=on"], "type sync_bn=off"),
        (["strategy=async_parameter_server", "gradient_sync=ring"], "type strategy=ddp"),
        (["strategy=async_parameter_server", "trainer.deterministic=true"], "type trainer.deterministic=false"),
        (["strategy=async_parameter_server", "trainer.precision=fp16"], "type trainer.precision=bf16"),
        (["strategy=async_parameter_server", "trainer.save_every=5steps"], "type trainer.save_every=1epochs"),
    ],
)
def test_what_does_not_go_together_is_refused(typed, said):
    import train

    cfg = entry.resolved(composed(*typed, "launch=spawn", "launch.nproc_per_node=3"))
    with pytest.raises(Refusal, match=said):
        train.refuse(cfg)


def test_a_server_without_a_worker_is_refused_before_anything_starts(train):
    assert "type launch=spawn launch.nproc_per_node=3" in train("strategy=async_parameter_server", code=2).output


def test_the_comparison_writes_its_table_and_asks_for_what_it_lacks(tmp_path):
    command = [sys.executable, ROOT / "bench" / "compare.py", "--worlds=2", "--syncs=ring,parameter_server", f"--out={tmp_path}", "--width=64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in (tmp_path / "compare.md").read_text().splitlines() if line.startswith("| 2 ")]
    assert [row[2].strip() for row in rows] == ["ring", "parameter_server"]
    assert (tmp_path / "compare.png").exists() or "pip install -r requirements-bench.txt" in done.stderr
