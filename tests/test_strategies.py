"""Every strategy trains to the numbers of one process, and a snapshot moves between all of them."""

import os
import signal
import sys

import pytest
import torch

from conftest import ROOT, events, in_world
from lockstep import data_parallel, snapshot
from lockstep.refusal import Refusal
from test_configs import composed
from test_same_numbers import drift

sys.path.insert(0, str(ROOT / "src"))

# 61 test samples by 20: with three ranks one of them evaluates one more batch than the others.
SMALL = ["dataset=random", "dataset.samples=61", "model=mlp", "trainer.batch_size=16", "trainer.eval_batch_size=20", "optimizer=adamw"]
DOUBLE = ["trainer.precision=fp64", "trainer.epochs=2", "optimizer.fused=false"]
AVERAGED = [*SMALL, *DOUBLE, "trainer.clip_norm=0.3", "trainer.ema=0.8", "objective=test/loss"]
CONVOLVING = [
    *DOUBLE,
    "model=convnet",
    "sync_bn=on",
    "trainer.batch_size=200",
    "trainer.accumulate=2",
    "dataset.augment.pad=1",
    "trainer.clip_norm=1.0",
]
HALVES = [*DOUBLE, "model=toy_parallel", "trainer.batch_size=200"]


def _train(configs):
    import train

    return [train.work(cfg) for cfg in configs]


def trained(size, folder, *runs):
    """[(objective, weights), ...] of `runs`, each a list of overrides, trained one after the other in one world of `size`."""
    folders = [folder / f"{size}_{number}" for number in range(len(runs))]
    answers = in_world(size, _train, [composed(f"run_dir={place}", *run) for place, run in zip(folders, runs, strict=True)])
    assert all(answer == answers[0] for answer in answers)
    return list(zip(answers[0], map(weights, folders), strict=True))


def weights(folder):
    return torch.cat([value.double().flatten() for value in torch.load(folder / "model.pt", weights_only=True).values()])


def test_every_strategy_trains_to_the_numbers_of_one_process(tmp_path):
    alone = trained(1, tmp_path, AVERAGED, CONVOLVING, HALVES)
    sharded, piped, together = ([f"strategy={name}"] for name in ("fsdp", "pipeline", "model_parallel"))
    one = trained(1, tmp_path / "dp", [*AVERAGED, "strategy=dp"])
    two = trained(2, tmp_path, [*CONVOLVING, *sharded], [*HALVES, *together], [*HALVES, *piped, "trainer.clip_norm=1e3"])
    three = trained(3, tmp_path, [*AVERAGED, *sharded, "strategy.reshard_after_forward=false"], [*AVERAGED, *piped])
    for expected, found in zip([alone[0], alone[1], alone[2], alone[2], alone[0], alone[0]], [*one, *two, *three], strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-9)
        assert drift(expected[1], found[1]) < 1e-9


def test_a_snapshot_moves_between_strategies_and_world_sizes(tmp_path):
    moving = [*AVERAGED, "scheduler=one_cycle", "trainer.epochs=6"]
    whole = trained(1, tmp_path, moving)[0]
    cfg = [f"run_dir={tmp_path / 'moved'}", *moving]
    for strategy, size in [("dp", 1), ("fsdp", 2), ("ddp", 3), ("fsdp", 3), ("pipeline", 2)]:
        assert in_world(size, _stopped, composed(*cfg, f"strategy={strategy}")) == [f"stopped by {strategy}"] * size
    (answer, _) = in_world(2, _train, [composed(*cfg)])
    saved = torch.load(snapshot.complete(tmp_path / "moved" / "snapshots")[0], weights_only=True)
    assert list(saved["optimizer"]["state"]) == list(saved["average"]) == list(saved["model"])
    assert answer == [pytest.approx(whole[0], rel=1e-9)]
    assert drift(whole[1], weights(tmp_path / "moved")) < 1e-9


def _stopped(cfg):
    """Train three steps or so, in mid-epoch, and be asked to stop."""
    import train
    from lockstep import loop, signals, snapshot

    snapshot.PAUSE = 0  # a vote a step
    update, steps = loop.update, []

    def asked(run):
        update(run)
        steps.append(run.progress.step)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    loop.update = asked
    with pytest.raises(signals.Stopped):
        train.work(cfg)
    assert 2 <= len(steps) <= 4
    return f"stopped by {cfg.strategy._target_.rpartition('.')[2]}"


def _sharded_numbers():
    from lockstep import fully_sharded, world

    with world.join("gloo", 60) as ranks:
        net = fully_sharded.fsdp(torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 7)), ranks, reshard_after_forward=True)
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.ones(4, 100)).sum().backward()
        optimizer.step()
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        gradients = [parameter.grad for parameter in net.parameters()]
        return [sum(tensor.to_local().numel() for tensor in tensors) for tensors in (net.parameters(), gradients, moments)]


def test_fsdp_ranks_share_out_weights_gradients_and_moments():
    for ranks in zip(*in_world(3, _sharded_numbers), strict=True):
        assert sum(ranks) == 101 * 50 + 51 * 7
        assert max(ranks) < 0.4 * sum(ranks)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_options_train_under(tmp_path, strategy):
    short = ["trainer.max_steps=3", f"strategy={strategy}"]
    runs = [["trainer.precision=bf16"], ["optimizer=adamw", "sync_bn=off", "trainer.batch_size=61"]]
    runs += [["trainer.precision=fp16", "sync_bn=on"], ["model=resnet18", "trainer.precision=bf16"]] if strategy == "fsdp" else []
    assert all(torch.isfinite(values).all() for _, values in trained(2, tmp_path, *[[*short, *run] for run in runs]))


def test_a_pipeline_by_one_command(train):
    run = train("launch=spawn", "strategy=pipeline", "model=mlp", "trainer.epochs=2", "trainer.log_every=5")
    assert len(run.epochs) == 2
    assert events(run.folder)["test/accuracy"][-1][1] > 0.5
    assert torch.load(run.folder / "model.pt", weights_only=True).keys() == {f"{layer}.{kind}" for layer in (1, 4, 7) for kind in ("weight", "bias")}


def test_dp_gives_the_first_device_its_share():
    assert data_parallel.sizes(100, 4, 1.0) == [25, 25, 25, 25]
    assert data_parallel.sizes(100, 4, 0.5) == [14, 29, 29, 28]
    assert data_parallel.sizes(2, 4, 0.1) == [1, 1, 0, 0]
    for samples in range(1, 50):
        assert all(sum(data_parallel.sizes(samples, devices, 0.3)) == samples for devices in range(1, 6))
    sent, options = data_parallel.Balanced(torch.nn.Identity(), 0.5).scatter((torch.arange(7.0).reshape(7, 1),), {}, ["cpu"] * 3)
    assert [batch.flatten().tolist() for (batch,) in sent] == [[0], [1, 2, 3], [4, 5, 6]]
    assert len(options) == 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs")
def test_two_gpus_train_to_the_numbers_of_one(train, tmp_path):
    plain = [*HALVES, "backend=nccl", "trainer.deterministic=true"]
    train(*plain, "hydra.run.dir=one")
    for name, more in (("dp", ["strategy=dp", "strategy.first_share=0.5"]), ("halves", ["strategy=model_parallel"])):
        train(*plain, *more, f"hydra.run.dir={name}")
        assert drift(weights(tmp_path / "one"), weights(tmp_path / name)) < 1e-9


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["strategy=dp", "launch=spawn"], "type strategy=ddp"),
        (["strategy=dp", "sync_bn=on"], "type sync_bn=off"),
        (["strategy=dp", "strategy.first_share=0"], "try strategy.first_share=0.5"),
        (["strategy=fsdp", "optimizer.fused=true"], "type optimizer.fused=false"),
        (["strategy=pipeline", "sync_bn=on"], "type sync_bn=off"),
        (["strategy=pipeline", "trainer.precision=fp16"], "type trainer.precision=bf16"),
        (["strategy=pipeline", "trainer.compile=true"], "type trainer.compile=false"),
        (["strategy=pipeline", "strategy.schedule=DualPipe"], "type strategy.schedule=1F1B"),
        (["strategy=model_parallel", "strategy.devices=two"], "try strategy.devices=2"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_does_not_go_together_is_refused(typed, said):
    import train

    with pytest.raises(Refusal, match=said):
        train.refuse(composed(*typed))


@pytest.mark.parametrize(("net", "said"), [("resnet18", "try model=convnet"), ("linear", "try model=mlp")])
def test_a_net_that_has_no_stages_is_refused(tmp_path, net, said):
    assert all(said in answer for answer in in_world(2, _refused, composed(f"run_dir={tmp_path}", "strategy=pipeline", f"model={net}")))


def _refused(cfg):
    import train

    with pytest.raises(Refusal) as refusal:
        train.work(cfg)
    return str(refusal.value)
