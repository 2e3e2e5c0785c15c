"""The data sets of the zoo: the same 22 images in every form in which people bring samples and targets."""

import os
import random
import tempfile
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep.data import DataSource, Splits, Tensors
from lockstep.tasks.base import Task

TRAIN, TEST, CLASSES, SIDE = 22, 11, 4, 6
IGNORED = 255


@dataclass(frozen=True)
class Truth:
    """What a kind of data set means. images (N, 1, 6, 6) in float64, as a net must see them. task: as typed.

    draws: whether a sample is another one each time that it is read.
    holds_out: whether a part of the training data is the validation set, in place of the test data.
    """

    images: Tensor
    targets: Tensor
    task: str
    draws: bool
    holds_out: bool
    words: tuple[str, ...]


def pixels(train):
    """uint8 (N, 1, 6, 6)."""
    generator = torch.Generator().manual_seed(int(train))
    return torch.randint(0, 256, (TRAIN if train else TEST, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)


def scaled(train):
    return pixels(train).double() / 255


def values(train):
    """float32 images, exact in every floating-point type of 32 bits and more."""
    return pixels(train).float() / 256


def labels(train):
    """Class numbers (N,): the brightest quarter of an image."""
    return F.avg_pool2d(pixels(train).float(), 3).flatten(1).argmax(1)


def masks(train):
    found = pixels(train).squeeze(1).long() // 64
    found[:, 0, 0] = IGNORED
    return found


def amounts(train):
    return values(train).flatten(1).mean(1)


def several_amounts(train):
    return F.avg_pool2d(values(train), 3).flatten(1)


KINDS = {}
TRUTHS = {}


def keep(name, make=None, *words, images=values, targets=labels, task="classification", draws=False, holds_out=False):
    """make: the data set, by default of `images` and `targets`, which a net must see. words: typed beside it."""
    KINDS[name] = make or of(images, targets)
    TRUTHS[name] = lambda train: Truth(images(train).double(), targets(train), task, draws, holds_out, words)


def of(images=values, targets=labels):
    return lambda train: TensorDataset(images(train), targets(train))


class Items(Dataset):
    """Sample number i is make(images, class numbers, i)."""

    def __init__(self, images, classes, make):
        self.images, self.classes, self.make = images, classes, make

    def __len__(self):
        return len(self.classes)

    def __getitem__(self, index):
        return self.make(self.images, self.classes, index)


def each(make, images=values):
    return lambda train: Items(images(train), labels(train), make)


class InAFile(Items):
    """Seeks and reads in one file. early: it is opened in the constructor, else by the first sample."""

    def __init__(self, train, early):
        file = tempfile.NamedTemporaryFile(suffix=".raw", delete=False)  # noqa: SIM115
        file.write(pixels(train).numpy().tobytes())
        file.close()
        self.path, self.classes = Path(file.name), labels(train)
        self.file = self.path.open("rb") if early else None

    def __getitem__(self, index):
        if self.file is None:
            self.file = self.path.open("rb")
        self.file.seek(index * SIDE * SIDE)
        image = np.frombuffer(self.file.read(SIDE * SIDE), np.uint8).copy().reshape(1, SIDE, SIDE)
        return torch.from_numpy(image), int(self.classes[index])


@dataclass(kw_only=True)
class Source(DataSource):
    """Its preparation draws, as the making of a data set may, on its first run only."""

    kind: str

    def prepare(self):
        torch.manual_seed(int.from_bytes(os.urandom(4)))
        np.random.seed()
        random.seed()

    def splits(self):
        return Splits(*(make(self.kind, train) for train in (True, False, False)))


class Weighted(Task):
    """Cross entropy, whose mean is over the weights. Targets (N, 2) are class numbers and weights."""

    counts = "weights"

    def __call__(self, outputs, targets):
        return {"loss": F.cross_entropy(outputs, targets[:, 0].long(), reduction="none") * targets[:, 1]}

    def count(self, targets):
        return targets[:, 1].sum()


class OtherOrder(TensorDataset):
    """The names of classes in another order in the tests."""

    def __init__(self, train):
        super().__init__(values(train), labels(train))
        self.classes = list("abcd" if train else "dcba")


def make(kind, train):
    return KINDS[kind](train)


def words_of(kind):
    """What is typed for a kind of data set."""
    return ["dataset=zoo_source"] if kind == "own_source" else ["dataset=zoo", f"dataset.train.kind={kind}"]


def drawn(images, classes, index):
    """An image with noise of every source."""
    noise = torch.rand(1, SIDE, SIDE) + float(np.random.rand()) + random.random()
    return images[index] + 0.1 * noise, int(classes[index])


def pair_of(samples):
    """A collate_fn: of dicts with the target beside the image, and of triples with a name between them."""
    rows = [[*one.values()] if isinstance(one, dict) else one for one in samples]
    return torch.stack([row[0] for row in rows]), torch.tensor([row[-1] for row in rows])


def scaled_batch(samples):
    """A collate_fn that draws a number for the batch."""
    images, classes = zip(*samples, strict=True)
    return torch.stack(images) * (0.5 + float(np.random.rand())), torch.stack(classes)


def part(places):
    return lambda train: Subset(make("tensors", train), range(TRAIN if train else TEST)[places])


def flipped(of):
    return lambda train: of(train).flip(-1) if train else of(train)


def described(train, **more):
    return Tensors(values(train), labels(train), **more)


# Containers.
COLLATED = "loader.collate_fn={_target_:zoo.data.%s}"
Pair = namedtuple("Pair", "image label")
keep("tensors")
keep("in_memory", described)
keep("in_memory_uint8", lambda train: Tensors(pixels(train), labels(train)), images=scaled)
keep("pairs", each(lambda x, y, i: (x[i], int(y[i]))))
keep("lists", each(lambda x, y, i: [x[i], int(y[i])]))
keep("dicts", each(lambda x, y, i: ({"image": x[i]}, int(y[i]))))
keep("dicts_of_two", each(lambda x, y, i: ({"image": x[i], "size": torch.tensor(i)}, y[i])))
keep("dict_samples", each(lambda x, y, i: {"image": x[i], "label": int(y[i])}), COLLATED % "pair_of")
keep("nested", each(lambda x, y, i: ((x[i], x[i].sum()), y[i])))
keep("named", each(lambda x, y, i: Pair(x[i], y[i])))
keep("triples", each(lambda x, y, i: (x[i], f"{i}.png", int(y[i]))), COLLATED % "pair_of")
keep("subset", part(slice(None)))
keep("joined", lambda train: ConcatDataset([part(slice(5))(train), part(slice(5, None))(train)]))
# Types of images and of class numbers.
keep("float64", each(lambda x, y, i: (x[i].double(), y[i])))
keep("float16", each(lambda x, y, i: (x[i].half(), y[i])))
keep("numpy", each(lambda x, y, i: (x[i].numpy(), np.int64(y[i]))))
keep("numpy_flipped", each(lambda x, y, i: (x[i].flip(2).numpy()[:, :, ::-1], int(y[i]))))
keep("int32_classes", each(lambda x, y, i: (x[i], y[i].int())))
keep("numpy_uint8_classes", each(lambda x, y, i: (x[i], np.uint8(y[i]))))
keep("transposed", each(lambda x, y, i: (x[i].mT.contiguous().mT, y[i])))
keep("expanded", images=lambda train: values(train)[:, :, :1].expand(-1, 1, SIDE, SIDE))
KINDS["expanded"] = each(lambda x, y, i: (x[i][:, :1].expand(1, SIDE, SIDE), y[i]))
keep("uint8", of(pixels), images=scaled)
NORM = ("dataset.mean=[0.25]", "dataset.std=[0.5]")
keep("normalised", of(pixels), *NORM, images=lambda train: (scaled(train) - 0.25) / 0.5)
keep("bool", images=lambda train: pixels(train) > 127)
keep("int16", images=lambda train: pixels(train).short() - 128)
TO_IMAGE = [
    f"loader.{key}=[{{_target_:torchvision.transforms.v2.ToImage}}]" for key in ("transforms", "test_transforms")
]
pictures = each(lambda x, y, i: (Image.fromarray(x[i, 0].numpy()), int(y[i])), pixels)
keep("pictures", pictures, *TO_IMAGE, images=scaled)
# What is read or drawn when a sample is asked for.
MIX = "loader.batch_transforms=[{_target_:torchvision.transforms.v2.MixUp,alpha:0.5,num_classes:null}]"
SHIFT = "loader.augment={_target_:lockstep.data.augment.ShiftFlip,pad:1,flip:true}"
keep("file", lambda train: InAFile(train, early=False), images=scaled)
keep("early_file", lambda train: InAFile(train, early=True), "loader.num_workers=2", images=scaled)
keep("drawn", each(drawn), draws=True)
keep("mixed", None, MIX, draws=True)
keep("augmented", KINDS["in_memory_uint8"], SHIFT, images=scaled, draws=True)
keep("scaled_batches", None, COLLATED % "scaled_batch", draws=True)
# Targets of other tasks.
SEGMENTED = ("+model.places=36", f"task.ignored_label={IGNORED}")
FLIP = "loader.transforms=[{_target_:torchvision.transforms.v2.RandomHorizontalFlip,p:1.0}]"
FLIPPED = {"images": flipped(values), "targets": flipped(masks)}
one_amount = each(lambda x, y, i: (x[i], float(x[i].mean())))
keep("soft_labels", targets=lambda train: F.one_hot(labels(train), CLASSES).float() * 0.75 + 0.0625)
keep("amounts", one_amount, "dataset.classes=1", targets=amounts, task="regression")
keep("several_amounts", targets=several_amounts, task="regression")
keep("several_labels", targets=lambda train: (several_amounts(train) > 0.5).float(), task="multi_label")
keep("masks", None, *SEGMENTED, targets=masks, task="segmentation")
keep("flipped_masks", of(values, masks), *SEGMENTED, FLIP, **FLIPPED, task="segmentation")
weights = lambda train: 0.25 + (amounts(train) > 0.5) * 0.5  # noqa: E731
keep("weighted", targets=lambda train: torch.stack([labels(train).float(), weights(train)], 1), task="weighted")
# What a data set says of its samples.
HOLDS_OUT = ("dataset.validation=null", "loader.validation=0.25", "loader.groups=auto")
sampled = lambda train: described(train, weights=labels(train) + 1.0)  # noqa: E731
grouped = lambda train: described(train, groups=torch.arange(len(labels(train))) // 2)  # noqa: E731
keep("sampled", sampled, "loader.sampling=weights", draws=True)
keep("grouped", grouped, *HOLDS_OUT, draws=True, holds_out=True)
keep("own_source", described)
# Targets that are none: refused, whatever the net and the options are.
before = [*KINDS]
keep("stray_classes", of(targets=lambda train: labels(train) + 1))
keep("stray_labels", of(targets=lambda train: labels(train)[:, None].repeat(1, 4)), task="multi_label")
keep("binary_masks", of(targets=lambda train: (masks(train) > 1) * 255))
keep("names_in_another_order", OtherOrder)
REFUSED = [name for name in KINDS if name not in before]
