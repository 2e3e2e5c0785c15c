"""Batches are the same on any number of ranks, with workers, in micro-batches, and after a stop in mid-epoch."""

from itertools import islice, product

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare
from torch.utils.data import Subset
from torchvision.transforms import v2

from lockstep.config.check import instantiate
from lockstep.data import loader as loader_module
from lockstep.data.augment import ShiftFlip, drawn_at
from lockstep.data.build import build_data, completed, sampling_weights
from lockstep.data.loader import MIX, InputConverter
from lockstep.data.partition import Order, fold_in, generator
from lockstep.data.source import Tensors
from lockstep.errors import ConfigError
from support.configs import composed
from support.loaders import SEED, Position, loader
from support.own_data import Noisy

SAMPLES = 103  # the last batch of an epoch has 3 samples: fewer than ranks times micro-batches


def pictures(count=SAMPLES):
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=draw)
    return Tensors(pixels, torch.randint(0, 10, (count,), generator=draw))


FEW = pictures(23)
IMAGES = FEW.inputs


def train(data, size=1, start=(0, 0), batches=7, **options):
    """What all ranks get of so many batches: (number, samples, inputs, targets), in the order of the global batch."""
    reading = [loader(data, rank, size, **options).batches(Position(*start)) for rank in range(size)]
    ranks, found = [[*islice(one, batches)] for one in reading], []
    for of_ranks in zip(*ranks, strict=True):
        loaded = sorted((part for batch in of_ranks for part in batch.parts), key=lambda part: part.number)
        inputs, targets = (torch.cat([getattr(part, name) for part in loaded]) for name in ("inputs", "targets"))
        assert [part.start for part in loaded] == sorted(part.start for part in loaded)
        found.append((of_ranks[0].number, of_ranks[0].count, inputs, targets))
    return found


@pytest.mark.parametrize("at_once", [1, 60, 2**20])
def test_an_epoch_has_each_sample_once_normalised(at_once, monkeypatch):
    """at_once: samples that are looked up together."""
    monkeypatch.setattr(loader_module, "VALUES_AT_ONCE", at_once * 192)
    memory = pictures()
    batches = train(memory, 2, batches=5)
    assert [batch[:2] for batch in batches] == [(0, 25), (1, 25), (2, 25), (3, 25), (4, 3)]  # none padded, none dropped
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(fold_in(SEED, 0)))
    expected = (memory.inputs[order].double() / 255 - 0.4) / 0.2
    torch.testing.assert_close(torch.cat([batch[2] for batch in batches]), expected, rtol=0, atol=1e-14)
    assert torch.cat([batch[3] for batch in batches]).equal(memory.targets[order])


def test_files_are_shuffled_and_samples_within_windows_of_files():
    shards = torch.arange(1000) // 50
    order = Order(1000, 1, shards=shards, window=120).epoch(0)
    assert order.sort().values.equal(torch.arange(1000))
    windows = [shards[rows].unique() for rows in order.split(150)]  # the first files that hold 120 samples or more
    assert [len(files) for files in windows] == [3] * 6 + [2]
    assert torch.cat(windows).sort().values.equal(torch.arange(20))
    assert not torch.cat(windows).equal(torch.arange(20))
    assert (shards[order].diff() != 0).sum() > 400


@pytest.mark.parametrize("is_read", [True, False])
def test_every_sample_is_evaluated_once_for_any_size_and_world(is_read):
    for count, size in product((1, 6, 7, 8, 22), (1, 2, 4)):
        memory = Tensors(torch.zeros(count, 1), torch.arange(count))
        data = [memory[number] for number in range(count)] if is_read else memory
        of_ranks = [list(loader(data, rank, size, mean=None).evaluation(7)) for rank in range(size)]
        assert len({len(found) for found in of_ranks}) == 1  # ranks may have to compute together
        loaded = [part for found in of_ranks for part in found]
        assert all(part.inputs.shape[1:] == (1,) for part in loaded)  # an empty part has its shape
        assert sorted(torch.cat([part.targets for part in loaded]).tolist()) == list(range(count))
        assert all(part.numbers.equal(part.targets) for part in loaded)


@pytest.mark.parametrize("shape", [(5, 3, 4, 4), (5, 3), (5, 3, 7)])
def test_inputs_are_scaled_normalised_by_channel_and_brought_to_the_type_of_the_model(shape):
    pixels, mean, std = torch.randint(0, 256, shape, dtype=torch.uint8), [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    means, stds = (torch.tensor(values, dtype=torch.double).view(-1, *[1] * (len(shape) - 2)) for values in (mean, std))
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    scaled = pixels.double() / 255
    exact = (scaled - means) / stds
    for samples in (pixels, scaled, scaled.float()):  # floats are not scaled
        for dtype, limit in ((torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
            found = InputConverter(dtype, layout, mean, std)(samples)
            assert (found.dtype, found.is_contiguous(memory_format=layout)) == (dtype, True)
            limit = max(limit, 1e-6) if samples.dtype == torch.float32 else limit
            assert ((found.double() - exact).abs() <= limit * exact.abs().clamp(min=1)).all()


MIXES = [v2.MixUp(alpha=0.4, num_classes=10), v2.CutMix(alpha=1.0, num_classes=10)]


@pytest.mark.parametrize(("size", "micro"), [(1, 1), (1, 3), (3, 2), (9, 1)])
@pytest.mark.parametrize("transforms", [MIXES[:1], MIXES[1:], MIXES, [v2.Compose(MIXES)], [v2.RandomChoice(MIXES)]])
def test_a_batch_is_what_torchvision_makes_of_the_whole_batch(transforms, size, micro):
    mixing = {"micro": micro, "transforms": transforms}
    found, plain = train(FEW, size, (1, 0), 3, batch=8, **mixing), train(FEW, 1, (1, 0), 3, batch=8)
    for (number, _, *one), (_, _, *mixed) in zip(found, plain, strict=True):
        for place, transform in enumerate(transforms):
            torch.manual_seed(fold_in(SEED, 1, number * 8, MIX, place))
            mixed = transform(*mixed)
        torch.testing.assert_close(one[0], mixed[0], rtol=0, atol=1e-14)
        torch.testing.assert_close(one[1].double(), mixed[1].double(), rtol=0, atol=1e-7)


def numbers_for(places, pad, epoch=0):
    return drawn_at(places, [2 * pad + 1, 2 * pad + 1, 2], fold_in(SEED, epoch))


def moved(image, pad, dy, dx, mirrored):
    _, height, width = image.shape
    window = F.pad(image.float(), [pad] * 4, "reflect").to(image.dtype)[:, dy : dy + height, dx : dx + width]
    return window.flip(2) if mirrored else window


@pytest.mark.parametrize("flip", [True, False])
def test_each_image_is_shifted_and_mirrored_by_its_own_numbers(flip):
    augment, places = ShiftFlip(epochs=1, pad=2, flip=flip), torch.arange(5, 5 + 23)
    found = augment(IMAGES, SEED, 0, places, places)
    for n, (dy, dx, mirrored) in enumerate(numbers_for(places, 2).tolist()):
        assert found[n].equal(moved(IMAGES[n], 2, dy, dx, flip and bool(mirrored)))
    assert found[3:9].equal(augment(IMAGES[3:9], SEED, 0, places[3:9], places[3:9]))  # in any part of a batch


def test_random_numbers_depend_on_place_and_epoch_and_on_nothing_else():
    places = torch.arange(20_000)
    draws, other = numbers_for(places, 9), numbers_for(places, 9, epoch=1)
    assert draws[5000:5010].equal(numbers_for(places[5000:5010], 9))
    columns = torch.cat([draws[1:], draws[:-1], other[1:]], 1).T.double()  # those of neighbours and of another epoch
    assert (torch.corrcoef(columns) - torch.eye(9)).abs().max() < 0.04
    assert chisquare((draws[:, 0] * 19 + draws[:, 1]).bincount(minlength=361)).pvalue > 1e-3
    assert chisquare(draws[:, 2].bincount(minlength=2)).pvalue > 1e-3


def test_alternating_mirror_images_show_each_image_both_ways_in_two_epochs():
    augment, shuffled = ShiftFlip(epochs=4, flip="alternating"), torch.randperm(23)

    def mirrored(epoch):
        found = augment(IMAGES[shuffled], SEED, epoch, torch.arange(23), shuffled)
        flipped = found.eq(IMAGES[shuffled].flip(3)).flatten(1).all(1)
        assert (flipped | found.eq(IMAGES[shuffled]).flatten(1).all(1)).all()
        return flipped[shuffled.argsort()].tolist()

    even, odd = mirrored(0), mirrored(1)
    assert 0 < sum(even) < 23
    assert odd == [not one for one in even]
    assert mirrored(2) == even


def test_images_grow_with_the_epochs():
    """[4, 6, 8] over 6 epochs: two of each. The pixels are those of torchvision."""
    augment, images = ShiftFlip(epochs=6, sizes=[4, 6, 8]), IMAGES.double()
    for epoch, size in enumerate((4, 4, 6, 6, 8, 8, 8)):  # a 7th epoch is like the last one
        expected = v2.functional.resize(images, [size, size], antialias=True)
        torch.testing.assert_close(augment.resized(images, epoch), expected, rtol=0, atol=1e-9)
    few = ShiftFlip(epochs=2, sizes=[4, 6, 8])  # the last size is always reached
    assert [few.resized(images, epoch).shape[-1] for epoch in (0, 1)] == [6, 8]
    assert augment.resized(images.bfloat16(), 0).dtype == torch.bfloat16
    grown = [train(FEW, start=(epoch, 0), batches=1, augment=ShiftFlip(epochs=2, sizes=[4, 8])) for epoch in (0, 1)]
    assert [len(batch[2][0, 0]) for (batch,) in grown] == [4, 8]


def test_classes_of_mixes_are_told_by_the_data():
    node = "{_target_:torchvision.transforms.v2.MixUp,num_classes:null}"
    choice = f"{{_target_:torchvision.transforms.v2.RandomChoice,transforms:[{node}]}}"
    config = composed(f"loader.batch_transforms=[{node},{choice}]")
    one, two = instantiate(completed(config, build_data(config)).loader.batch_transforms)
    assert [one.num_classes, two.transforms[0].num_classes] == [10, 10]


UNEVEN = torch.tensor([0] * 80 + [1] * 15 + [2] * 5)


def test_an_epoch_draws_at_random_each_sample_as_often_as_its_weight_says():
    weights = torch.rand(1000, dtype=torch.float64, generator=generator(3)) ** 4
    weights[::7] = 0
    order = Order(1000, 0, weights=weights)
    counts = torch.stack([order.epoch(epoch) for epoch in range(200)]).flatten().bincount(minlength=1000)
    assert not counts[::7].any()
    assert chisquare(counts[weights > 0], (weights / weights.sum() * 200_000)[weights > 0]).pvalue > 1e-3
    assert order.epoch(0).equal(order.epoch(0))
    assert not order.epoch(0).equal(order.epoch(1))
    order = Order(10, 0, draws=20_000)
    assert len(order) == len(order.epoch(0)) == 20_000
    pairs = order.epoch(0).view(-1, 2)
    assert chisquare((pairs[:, 0] * 10 + pairs[:, 1]).bincount(minlength=100)).pvalue > 1e-3


def test_balanced_draws_every_class_equally_often_and_keeps_the_length_of_an_epoch():
    part = Subset(Tensors(torch.zeros(100, 1), UNEVEN), range(0, 100, 2))
    weights = sampling_weights(part, "balanced")
    rows = torch.cat([Order(50, 1, weights=weights).epoch(epoch) for epoch in range(50)])
    assert len(rows) == 50 * 50
    assert chisquare(UNEVEN[::2][rows].bincount()).pvalue > 1e-3


def own(**attributes):
    dataset = Noisy(4)
    dataset.__dict__ |= attributes
    return dataset


UNTOLD = [
    (own(), "balanced", "needs an attribute `targets` .*; give it one, or type loader.sampling=null"),
    (own(targets=[0.5, 1.0, 2.0, 3.0]), "balanced", "needs an attribute `targets`"),
    (own(targets=[0, 1]), "balanced", "Noisy has 4 samples, and its attribute targets 2 values"),
    (own(targets=torch.zeros(4, 2)), "balanced", "needs an attribute `targets`"),
    (own(), "weights", "needs an attribute `weights` .*, or type loader.sampling=null"),
    (own(weights=[1] * 5), "weights", "has 4 samples, and its attribute weights 5 values"),
]


def test_weights_are_those_of_the_samples_of_a_part_and_data_that_does_not_tell_them_is_refused():
    found = sampling_weights(Subset(own(weights=[1, 2, 0, 0.5]), [3, 1]), "weights")
    assert (found.tolist(), found.dtype) == ([0.5, 2], torch.float64)
    for dataset, sampling, sentence in UNTOLD:
        with pytest.raises(ConfigError, match=sentence):
            sampling_weights(dataset, sampling)
    with pytest.raises(RuntimeError, match="probability"):
        Order(4, 0, weights=torch.tensor([1, 2, -1, 0], dtype=torch.float64)).epoch(0)
    with pytest.raises(ValueError, match="negative"):
        sampling_weights(own(targets=[0, 1, -100, 1]), "balanced")
