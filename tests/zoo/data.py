"""The data sets of the zoo: the same 22 images in every form in which people bring samples and targets."""

import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep.data import DataSource, Splits, Tensors

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
    task: str = "classification"
    draws: bool = False
    holds_out: bool = False
    words: tuple[str, ...] = ()


def pixels(train: bool) -> Tensor:
    """uint8 (N, 1, 6, 6)."""
    generator = torch.Generator().manual_seed(int(train))
    return torch.randint(0, 256, (TRAIN if train else TEST, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)


def labels(train: bool) -> Tensor:
    """Class numbers (N,): the brightest quarter of an image."""
    quarters = torch.nn.functional.avg_pool2d(pixels(train).float(), 3).flatten(1)
    return quarters.argmax(1)


def values(train: bool) -> Tensor:
    """float32 images, exact in every floating-point type of 32 bits and more."""
    return pixels(train).float() / 256


def masks(train: bool) -> Tensor:
    found = pixels(train).squeeze(1).long() // 64
    found[:, 0, 0] = IGNORED
    return found


class Pair(NamedTuple):
    image: Any
    label: Any


class Items(Dataset[Any]):
    """Samples made by `make` of their number."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class InAFile(Dataset[Any]):
    """Seeks and reads in one file. early: it is opened in the constructor, else by the first sample."""

    def __init__(self, train: bool, early: bool) -> None:
        file = tempfile.NamedTemporaryFile(suffix=".raw", delete=False)  # noqa: SIM115
        file.write(pixels(train).numpy().tobytes())
        file.close()
        self.path, self.targets = Path(file.name), labels(train)
        self.file = self.path.open("rb") if early else None

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = self.path.open("rb")
        self.file.seek(index * SIDE * SIDE)
        image = np.frombuffer(self.file.read(SIDE * SIDE), np.uint8).copy().reshape(1, SIDE, SIDE)
        return torch.from_numpy(image), int(self.targets[index])


def scaled_batch(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A collate_fn that draws a number for the batch."""
    images, classes = zip(*samples, strict=True)
    return torch.stack(images) * (0.5 + float(np.random.rand())), torch.stack(classes)


def drawn(index: int, train: bool) -> Any:
    """An image with noise of every source."""
    noise = torch.rand(1, SIDE, SIDE) + float(np.random.rand()) + random.random()
    return values(train)[index] + 0.1 * noise, int(labels(train)[index])


def pair_of(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A collate_fn: of triples."""
    return torch.stack([one for one, _, _ in samples]), torch.tensor([label for _, _, label in samples])


def pair_of_dicts(samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """A collate_fn: of dicts with the target beside the image."""
    return torch.stack([one["image"] for one in samples]), torch.tensor([one["label"] for one in samples])


KINDS: dict[str, Callable[[bool], Any]] = {}
TRUTHS: dict[str, Callable[[bool], Truth]] = {}


def kind(name: str, make: Callable[[Tensor, Tensor, int], Any], truth: Callable[[bool], Truth] | None = None) -> None:
    """A data set whose sample number i is make(images, class numbers, i)."""
    KINDS[name] = lambda train: Items(len(labels(train)), lambda index: make(values(train), labels(train), index))
    TRUTHS[name] = truth or plain


def whole(name: str, make: Callable[[bool], Any], truth: Callable[[bool], Truth] | None = None) -> None:
    KINDS[name], TRUTHS[name] = make, truth or plain


def plain(train: bool) -> Truth:
    return Truth(values(train).double(), labels(train))


def scaled(train: bool) -> Truth:
    """Of uint8 images."""
    return Truth(pixels(train).double() / 255, labels(train))


def with_words(truth: Callable[[bool], Truth], *words: str, **changes: Any) -> Callable[[bool], Truth]:
    return lambda train: Truth(**{**truth(train).__dict__, "words": words, **changes})


def with_targets(task: str, targets: Callable[[bool], Tensor], *words: str) -> Callable[[bool], Truth]:
    return lambda train: Truth(values(train).double(), targets(train), task, words=words)


def make(kind: str, train: bool) -> Any:
    return KINDS[kind](train)


def words_of(kind: str) -> list[str]:
    """What is typed for a kind of data set."""
    if kind == "own_source":
        return ["dataset=zoo_source"]
    return ["dataset=zoo", f"dataset.train.kind={kind}"]


@dataclass(kw_only=True)
class Source(DataSource):
    """Its preparation draws, as the making of a data set may, on its first run only."""

    kind: str

    def prepare(self) -> None:
        torch.manual_seed(int.from_bytes(os.urandom(4)))
        np.random.seed()
        random.seed()

    def splits(self) -> Splits:
        return Splits(make(self.kind, True), make(self.kind, False), make(self.kind, False))


def one_hot(train: bool) -> Tensor:
    return torch.nn.functional.one_hot(labels(train), CLASSES).float()


def soft(train: bool) -> Tensor:
    return one_hot(train) * 0.75 + 0.0625


def amounts(train: bool) -> Tensor:
    return values(train).flatten(1).mean(1)


def several_amounts(train: bool) -> Tensor:
    return torch.nn.functional.avg_pool2d(values(train), 3).flatten(1)


def several_labels(train: bool) -> Tensor:
    return (several_amounts(train) > 0.5).float()


# Containers.
whole("tensors", lambda train: TensorDataset(values(train), labels(train)))
whole("in_memory", lambda train: Tensors(values(train), labels(train)))
whole("in_memory_uint8", lambda train: Tensors(pixels(train), labels(train)), scaled)
kind("pairs", lambda images, classes, i: (images[i], int(classes[i])))
kind("lists", lambda images, classes, i: [images[i], int(classes[i])])
kind("dicts", lambda images, classes, i: ({"image": images[i]}, int(classes[i])))
kind("dicts_of_two", lambda images, classes, i: ({"image": images[i], "size": torch.tensor(i)}, classes[i]))
kind("dict_samples", lambda images, classes, i: {"image": images[i], "label": int(classes[i])})
TRUTHS["dict_samples"] = with_words(plain, "loader.collate_fn={_target_:zoo.data.pair_of_dicts}")
kind("nested", lambda images, classes, i: ((images[i], images[i].sum()), classes[i]))
kind("named", lambda images, classes, i: Pair(images[i], classes[i]))
kind("triples", lambda images, classes, i: (images[i], f"{i}.png", int(classes[i])))
TRUTHS["triples"] = with_words(plain, "loader.collate_fn={_target_:zoo.data.pair_of}")
whole("subset", lambda train: Subset(TensorDataset(values(train), labels(train)), list(range(len(labels(train))))))
whole(
    "joined",
    lambda train: ConcatDataset(
        [TensorDataset(values(train)[part], labels(train)[part]) for part in (slice(0, 5), slice(5, None))]
    ),
)
# Types of images and of class numbers.
kind("float64", lambda images, classes, i: (images[i].double(), classes[i]))
kind("float16", lambda images, classes, i: (images[i].half(), classes[i]))
kind("numpy", lambda images, classes, i: (images[i].numpy(), np.int64(classes[i])))
kind("numpy_flipped", lambda images, classes, i: (images[i].flip(2).numpy()[:, :, ::-1], int(classes[i])))
kind("int32_classes", lambda images, classes, i: (images[i], classes[i].int()))
kind("numpy_uint8_classes", lambda images, classes, i: (images[i], np.uint8(classes[i])))
kind("transposed", lambda images, classes, i: (images[i].mT.contiguous().mT, classes[i]))
kind("expanded", lambda images, classes, i: (images[i][:, :1].expand(1, SIDE, SIDE), classes[i]))
TRUTHS["expanded"] = lambda train: Truth(values(train)[:, :, :1].expand(-1, 1, SIDE, SIDE).double(), labels(train))
whole("uint8", lambda train: TensorDataset(pixels(train), labels(train)), scaled)
whole(
    "normalised",
    lambda train: TensorDataset(pixels(train), labels(train)),
    with_words(
        lambda train: Truth((pixels(train).double() / 255 - 0.25) / 0.5, labels(train)),
        "dataset.mean=[0.25]",
        "dataset.std=[0.5]",
    ),
)
whole(
    "bool",
    lambda train: TensorDataset(pixels(train) > 127, labels(train)),
    lambda train: Truth((pixels(train) > 127).double(), labels(train)),
)
whole(
    "int16",
    lambda train: TensorDataset(pixels(train).short() - 128, labels(train)),
    lambda train: Truth(pixels(train).double() - 128, labels(train)),
)
whole(
    "pictures",
    lambda train: Items(
        len(labels(train)), lambda i: (Image.fromarray(pixels(train)[i, 0].numpy()), int(labels(train)[i]))
    ),
    with_words(
        scaled,
        "loader.transforms=[{_target_:torchvision.transforms.v2.ToImage}]",
        "loader.test_transforms=[{_target_:torchvision.transforms.v2.ToImage}]",
    ),
)
# What is read or drawn when a sample is asked for.
whole("file", lambda train: InAFile(train, early=False), scaled)
whole("early_file", lambda train: InAFile(train, early=True), with_words(scaled, "loader.num_workers=2"))
whole("drawn", lambda train: Items(len(labels(train)), lambda i: drawn(i, train)), with_words(plain, draws=True))
whole(
    "mixed",
    lambda train: TensorDataset(values(train), labels(train)),
    with_words(
        plain,
        "loader.batch_transforms=[{_target_:torchvision.transforms.v2.MixUp,alpha:0.5,num_classes:null}]",
        draws=True,
    ),
)
whole(
    "augmented",
    lambda train: Tensors(pixels(train), labels(train)),
    with_words(scaled, "loader.augment={_target_:lockstep.data.augment.ShiftFlip,pad:1,flip:true}", draws=True),
)
# Targets of other tasks.
SEGMENTED = ("+model.places=36", f"task.ignored_label={IGNORED}")
kind("soft_labels", lambda images, classes, i: (images[i], soft_of(images, i)), with_targets("classification", soft))
kind(
    "amounts",
    lambda images, classes, i: (images[i], float(images[i].mean())),
    with_targets("regression", amounts, "dataset.classes=1"),
)
whole(
    "several_amounts",
    lambda train: TensorDataset(values(train), several_amounts(train)),
    with_targets("regression", several_amounts),
)
whole(
    "several_labels",
    lambda train: TensorDataset(values(train), several_labels(train)),
    with_targets("multi_label", several_labels),
)
whole(
    "masks",
    lambda train: TensorDataset(values(train), masks(train)),
    with_targets("segmentation", masks, *SEGMENTED),
)
FLIP = "loader.transforms=[{_target_:torchvision.transforms.v2.RandomHorizontalFlip,p:1.0}]"
whole(
    "flipped_masks",
    lambda train: TensorDataset(values(train), masks(train)),
    lambda train: Truth(
        values(train).double().flip(-1) if train else values(train).double(),
        masks(train).flip(-1) if train else masks(train),
        "segmentation",
        words=(*SEGMENTED, FLIP),
    ),
)


kind("weighted", lambda images, classes, i: (images[i], weighted_of(images, classes)[i]))
TRUTHS["weighted"] = with_targets("weighted", lambda train: weighted_of(values(train), labels(train)))
whole(
    "scaled_batches",
    lambda train: TensorDataset(values(train), labels(train)),
    with_words(plain, "loader.collate_fn={_target_:zoo.data.scaled_batch}", draws=True),
)


def weighted_of(images: Tensor, classes: Tensor) -> Tensor:
    """(N, 2): class numbers and weights of the samples."""
    return torch.stack([classes.float(), 0.25 + (images.flatten(1).mean(1) > 0.5) * 0.5], 1)


# What a data set says of its samples.
HOLDS_OUT = ("dataset.validation=null", "loader.validation=0.25", "loader.groups=auto")
whole(
    "sampled",
    lambda train: Tensors(values(train), labels(train), weights=labels(train) + 1.0),
    with_words(plain, "loader.sampling=weights", draws=True),
)
whole(
    "grouped",
    lambda train: Tensors(values(train), labels(train), groups=torch.arange(len(labels(train))) // 2),
    with_words(plain, *HOLDS_OUT, draws=True, holds_out=True),
)
whole("own_source", lambda train: Tensors(values(train), labels(train)))
# Samples and targets that are none: refused, whatever the net and the options are.
REFUSED = {
    "stray_classes": lambda labels, train: (labels + 1, [], "classification"),
    "stray_labels": lambda labels, train: (labels[:, None].repeat(1, 4), [], "multi_label"),
    "binary_masks": lambda labels, train: ((masks(train) > 1) * 255, [], "segmentation"),
    "names_in_another_order": lambda labels, train: (labels, list("abcd" if train else "dcba"), "classification"),
}


class WithTargets(TensorDataset):
    """Images with other targets, and the names of classes."""

    def __init__(self, train: bool, name: str) -> None:
        targets, names, _ = REFUSED[name](labels(train), train)
        super().__init__(values(train), targets)
        if names:
            self.classes = names


for name, refused in REFUSED.items():
    KINDS[name] = partial(WithTargets, name=name)
    TRUTHS[name] = partial(
        lambda train, task: Truth(values(train), labels(train), task), task=refused(labels(True), True)[2]
    )


def soft_of(images: Tensor, index: int) -> Tensor:
    return soft(len(images) == TRAIN)[index]
