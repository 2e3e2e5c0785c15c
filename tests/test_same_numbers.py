"""The same numbers at any world size: shares, gradients, batch norm, evaluation."""

import sys

import pytest
import torch

from conftest import ROOT, TRAIN, in_world
from lockstep import data, datasets, losses, sync_bn
from test_configs import composed

sys.path.insert(0, str(ROOT / "src"))


class Place:
    """A world as far as the data room cares."""

    def __init__(self, rank, size):
        self.rank, self.size, self.device = rank, size, torch.device("cpu")


def _numbered(count):
    return datasets.InMemory(torch.arange(count).float().reshape(-1, 1), torch.arange(count))


def _loader(count, rank, size, **more):
    return data.Loader(_numbered(count), Place(rank, size), seed=1, mean=[0.0], std=[1.0], like=torch.zeros(1), **more)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("ahead", [1, 9, data.AHEAD])
def test_shares_make_up_the_same_global_batches(size, accumulate, ahead, monkeypatch):
    monkeypatch.setattr(data, "AHEAD", ahead)  # how many are looked up at once

    def batches(size, skip=0):
        each = [list(_loader(23, rank, size).epoch(4, 10, data.micro_batches(accumulate), skip)) for rank in range(size)]
        return [
            (ranks[0].count, [sum((ranks[r].parts[m][2].tolist() for r in range(size)), []) for m in range(accumulate)])
            for ranks in zip(*each, strict=True)
        ]

    whole = batches(1)
    assert [count for count, _ in whole] == [10, 10, 3]  # nothing padded, nothing dropped
    assert batches(size) == whole
    assert batches(size, skip=10) == whole[1:]  # a resume in mid-epoch, at any world size


def test_every_sample_is_evaluated_once_for_any_size_and_world():
    for count in range(41):
        for size in range(1, 6):
            seen = [target for rank in range(size) for _, targets in _loader(count, rank, size).once(7) for target in targets.tolist()]
            assert sorted(seen) == list(range(count))


def _count_right():
    """Accuracies of a fixed net over the first 1..40 digits, in this world."""
    from lockstep import loop, world

    digits = datasets.digits(train=False)
    with world.join("gloo", 60) as ranks:
        net = _fixed_net()
        recipe = loop.Recipe(losses.Classification(), 64, 1, None, None, None, "fp32", eval_batch_size=7, eval_every=1, patience=None)
        run = loop.Run(recipe, net, torch.optim.SGD(net.parameters()), None, None, None, None)
        accuracies = []
        for count in range(1, 41):
            part = datasets.InMemory(digits.samples[:count], digits.targets[:count])
            loader = data.Loader(part, ranks, 0, [0.0], [1.0], next(net.parameters()))
            accuracies.append(loop.evaluate(run, loader)["accuracy"])
        return accuracies


def _fixed_net():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def test_accuracy_is_the_integer_count_of_one_process():
    digits = datasets.digits(train=False)
    with torch.no_grad():
        right = (_fixed_net()(digits.samples[:40].float() / 255).argmax(1) == digits.targets[:40]).cumsum(0).tolist()
    counted = [correct / count for count, correct in enumerate(right, start=1)]
    for size in (1, 2, 3, 4):
        assert in_world(size, _count_right) == [counted] * size


def test_augmentation_is_a_function_of_the_sample_not_of_the_rank():
    images = datasets.InMemory(torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8), torch.arange(12))

    def batch(size):
        loaders = [data.Loader(images, Place(r, size), 0, [0.5] * 3, [0.5] * 3, torch.zeros(1), data.Augment(2, True)) for r in range(size)]
        shares = [next(loader.epoch(0, 10, data.micro_batches(1))).parts[0][1] for loader in loaders]
        return torch.cat(shares)

    assert torch.equal(batch(1), batch(3))
    shifted = data.Augment(pad=1)(images.samples, torch.tensor([[2, 1, 0]] * 12))
    assert torch.equal(shifted[:, :, :-1], images.samples[:, :, 1:])
    mirrored = data.Augment(flip=True)(images.samples, torch.tensor([[0, 0, 1]] * 12))
    assert torch.equal(mirrored, images.samples.flip(3))


def _norm_gradients(shares):
    """One training step of a synced net on this rank's share of 7 samples: outputs, gradients summed by hand, statistics."""
    from lockstep import world

    with world.join("gloo", 60) as ranks:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(48, 5), torch.nn.BatchNorm1d(5)
        )
        net = sync_bn.on(net.double(), ranks)
        x = torch.randn(7, 2, 6, 6, dtype=torch.double, generator=torch.Generator().manual_seed(1)) + 100
        losses.Classification()(net(x.split(shares)[ranks.rank]), torch.arange(7).remainder(5).split(shares)[ranks.rank])[0].backward()
        gradients = [ranks.total(parameter.grad) for parameter in net.parameters()]
        return torch.cat([value.flatten() for value in [*gradients, *net.buffers()]]).tolist()


def test_synced_batch_norm_is_the_whole_batchs_with_uneven_and_empty_shares():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(48, 5), torch.nn.BatchNorm1d(5)
    ).double()
    x = torch.randn(7, 2, 6, 6, dtype=torch.double, generator=torch.Generator().manual_seed(1)) + 100
    losses.Classification()(net(x), torch.arange(7).remainder(5))[0].backward()
    whole = torch.cat([value.flatten() for value in [*(parameter.grad for parameter in net.parameters()), *net.buffers()]])
    for shares in ([7], [4, 3], [5, 2, 0]):
        for synced in in_world(len(shares), _norm_gradients, shares):
            torch.testing.assert_close(torch.tensor(synced, dtype=torch.double), whole, rtol=1e-9, atol=1e-9)


def _train(cfg):
    import train

    return train.work(cfg)


def weights(size, folder, *overrides):
    cfg = composed("run_dir=" + str(folder), "trainer.epochs=2", "trainer.batch_size=61", *overrides)
    answers = in_world(size, _train, cfg)
    assert len(set(answers)) == 1  # one objective, on every rank
    return torch.cat([value.double().flatten() for value in torch.load(folder / "model.pt", weights_only=True).values()])


def drift(one, other):
    return ((one - other).norm() / one.norm()).item()


@pytest.mark.parametrize(
    "overrides",
    [
        ["sync_bn=on", "dataset.augment.pad=1"],
        ["sync_bn=on", "trainer.accumulate=3", "optimizer=adamw"],
        ["model=mlp", "trainer.clip_norm=0.5", "scheduler=one_cycle"],
    ],
    ids=["sync_bn", "accumulate", "mlp"],
)
def test_training_ends_in_the_same_weights_on_one_two_and_three_ranks(tmp_path, overrides):
    alone = weights(1, tmp_path / "1", "trainer.precision=fp64", *overrides)
    for size in (2, 3):
        assert drift(alone, weights(size, tmp_path / str(size), "trainer.precision=fp64", *overrides)) < 1e-9


def test_without_batch_norm_accumulation_is_the_whole_batch(tmp_path):
    plain = weights(1, tmp_path / "plain", "trainer.precision=fp64", "model=mlp")
    assert drift(plain, weights(2, tmp_path / "cut", "trainer.precision=fp64", "model=mlp", "trainer.accumulate=4")) < 1e-9


@pytest.mark.parametrize(
    "option", ["trainer.precision=bf16", "trainer.precision=fp16", "trainer.channels_last=false", "sync_bn=off", "model=resnet18"]
)
def test_options_train_on_two_ranks(tmp_path, option):
    assert torch.isfinite(weights(2, tmp_path, option, "trainer.max_steps=3", "trainer.deterministic=true")).all()


def test_ranks_whose_configs_differ_are_refused_by_the_key(tmp_path):
    answers = in_world(2, _differ, composed(f"run_dir={tmp_path}"))
    assert all("trainer.batch_size differs between ranks: 64 on rank 0 and 65 on rank 1" in answer for answer in answers)


def _differ(cfg):
    import os

    import train
    from lockstep.refusal import Refusal

    cfg.trainer.batch_size += int(os.environ["RANK"])
    try:
        train.work(cfg)
    except Refusal as refusal:
        return str(refusal)


BITWISE = ["strategy=shards", "trainer.shards=4", "optimizer=adamw", "trainer.epochs=2", "trainer.batch_size=61"]


def fingerprint(folder):
    """SHA-256 of weights, buffers and optimizer state of a run's last snapshot."""
    import hashlib

    from lockstep import snapshot

    saved = torch.load(snapshot.complete(folder / "snapshots")[0], weights_only=True)
    states = [value for state in saved["optimizer"]["state"].values() for value in state.values()]
    return hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in [*saved["model"].values(), *states])).hexdigest()


@pytest.mark.parametrize("net", [["model=convnet"], ["model=mlp", "model.dropout=0.3"]], ids=["batch norm", "dropout"])
def test_shards_end_in_identical_bits_at_any_world_size(tmp_path, net):
    prints = set()
    for size in (1, 2, 4):
        weights(size, tmp_path / str(size), *BITWISE, *net)
        prints.add(fingerprint(tmp_path / str(size)))
    assert len(prints) == 1


@pytest.mark.drill
def test_shards_end_in_identical_bits_from_other_starters_and_after_stops_at_other_sizes(tmp_path, start):
    twelve = [*BITWISE, "trainer.shards=12", "scheduler=constant"]
    for number, (starter, size) in enumerate([("spawn", 4), ("torchrun", 2), ("spawn", 1), ("spawn", 3)], start=1):
        ranks = f"launch.nproc_per_node={size}"
        last = [f"trainer.max_steps={11 * number}"] * (number < 4)  # each stop in mid-epoch
        start(sys.executable, TRAIN, *twelve, f"launch={starter}", ranks, f"hydra.run.dir={tmp_path}/parts", *last).finish()
    weights(1, tmp_path / "alone", *twelve)
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "alone")
