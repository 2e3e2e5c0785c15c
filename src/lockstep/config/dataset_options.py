"""The options of the group dataset. As `options.py`.

A data set's YAML has keys of its own, and readers (`dataset.train`, `dataset.test`) that take their values from them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.config.fields import LARGEST_SEED, choice, number, value
from lockstep.config.options import GROUPS, describes
from lockstep.config.schema import Dataset

DATASETS: dict[str, type] = {}  # {_target_ of dataset.train: schema of the node dataset}


def reads(target: str, *options: str) -> Callable[[type], type]:
    """Class decorator: the schema of the node dataset if the `_target_` of dataset.train is `target`."""

    def register(schema: type) -> type:
        DATASETS[target] = schema
        GROUPS.setdefault("dataset", {}).update(dict.fromkeys(options, schema))
        return schema

    return register


@reads("lockstep.data.digits.digits", "digits")
@reads("lockstep.data.cifar10.cifar10", "cifar10")
@dataclass
class TenClasses(Dataset):
    shape: list[int] = number(
        "Shape of an image.", min=1, length=3, example=[1, 28, 28], advice="the command without dataset.shape"
    )
    classes: int = number("Outputs of the model; the labels are 0 to 9.", min=10, example=10)


@reads("lockstep.data.mnist.mnist", "mnist", "fashion_mnist")
@dataclass
class MNIST(TenClasses):
    name: str = value("Folder of the files inside data_dir.", example="MNIST")


@reads("lockstep.data.decoded_images.image_folder", "image_folder")
@dataclass
class ImageFolder(Dataset):
    root: str = value("Folder that holds train/<class>/*.jpg and test/<class>/*.jpg.", example="data")
    test_split: str = value("Folder in root of the test images.", example="val")
    size: int = number("Pixels of the square that each image is resized and cropped to.", min=1, example=224)
    cache: str = choice("auto", "on", "off", help="Keep the decoded pixels in a file; auto: where that can be done.")
    cache_dir: str = value("Folder of the decoded pixels.", example="data/decoded")
    cache_limit: float = number("GB of decoded pixels of each half; more are not kept.", above=0, example=16)
    shape: list[int] = number("Shape of an image.", min=1, length=3, example=[3, 224, 224])
    classes: int | None = number("Folders in train/; null: as many as there are.", min=1, example=2)


@reads("lockstep.data.random_pairs.random_pairs", "random")
@dataclass
class RandomPairs(Dataset):
    samples: int = number("Pairs in each half.", min=1, example=2048)
    features: int = number("Numbers in a sample.", min=1, example=20)
    shape: list[int] = number("Shape of a sample.", min=1, example=[20])
    classes: int = number("Outputs of the model.", min=1, max=1, example=1)


@reads("lockstep.data.text.training_text", "text")
@dataclass
class Text(Dataset):
    path: str = value("The text file.", example="my.txt")
    symbols: str = choice("characters", "bytes", help="What a token is.")
    block: int = number("Tokens of a sample.", min=1, example=64)
    samples: int | None = number("Samples that an epoch draws; null: as many as fit side by side.", min=1, example=6000)
    shape: list[int] = number("Tokens of a sample, as a shape.", min=1, length=1, example=[64])
    classes: int = number("Different symbols of the whole text.", min=1, example=65)


@describes("lockstep.data.digits.digits")
@dataclass
class Half:
    train: bool = value("Whether this is the training data.", example=True)


@describes("lockstep.data.cifar10.cifar10")
@dataclass
class FilesReader(Half):
    data_dir: str = value("Folder of the data sets.", example="data")


@describes("lockstep.data.mnist.mnist")
@dataclass
class MNISTReader(FilesReader):
    name: str = value("Folder of the files inside data_dir.", example="MNIST")


@describes("lockstep.data.image_folder.ImageFolder")
@dataclass
class ImageFolderReader:
    root: str = value("As dataset.root.", example="data")
    split: str = value("Folder in root.", example="val")
    size: int | None = number("As dataset.size; null: images keep their size, for transforms.", min=1, example=224)
    classes: int | None = number("As dataset.classes.", min=1, example=2)


@describes("lockstep.data.decoded_images.image_folder")
@dataclass
class CachedImagesReader(ImageFolderReader):
    cache: str = choice("auto", "on", "off", help="As dataset.cache.")
    cache_dir: str = value("As dataset.cache_dir.", example="data/decoded")


@describes("lockstep.data.decode.decode_images")
@dataclass
class DecodeImages:
    root: str = value("As dataset.root.", example="data")
    test_split: str = value("As dataset.test_split.", example="val")
    train_size: int | None = number("As dataset.train.size.", min=1, example=224)
    test_size: int | None = number("As dataset.test.size.", min=1, example=224)
    classes: int | None = number("As dataset.classes.", min=1, example=2)
    cache: str = choice("auto", "on", "off", help="As dataset.cache.")
    cache_dir: str = value("As dataset.cache_dir.", example="data/decoded")
    limit: float = number("As dataset.cache_limit.", above=0, example=16)
    on_error: str = choice("fail", "skip", help="As dataset.on_error.")


@describes("lockstep.data.random_pairs.random_pairs")
@dataclass
class RandomPairsReader(Half):
    samples: int = number("As dataset.samples.", min=1, example=2048)
    features: int = number("As dataset.features.", min=1, example=20)
    seed: int = number("As seed.", min=0, max=LARGEST_SEED, example=0)


@describes("lockstep.data.text.held_out_text")
@dataclass
class TextReader:
    path: str = value("As dataset.path.", example="my.txt")
    symbols: str = choice("characters", "bytes", help="As dataset.symbols.")
    block: int = number("As dataset.block.", min=1, example=64)


@describes("lockstep.data.text.training_text")
@dataclass
class TrainingTextReader(TextReader):
    samples: int | None = number("As dataset.samples.", min=1, example=6000)


@describes("lockstep.data.text.check_text")
@dataclass
class TextCheck(TextReader):
    classes: int = number("As dataset.classes.", min=1, example=65)


@describes("lockstep.data.download.download")
@dataclass
class Download:
    data_dir: str = value("Folder of the data sets.", example="data")
    name: str = value("Name of the data set in torchvision.", example="MNIST")


@describes("lockstep.data.batch_transforms.MixUp")
@describes("lockstep.data.batch_transforms.CutMix")
@dataclass
class Mixing:
    alpha: float = number("The share of an image is drawn from Beta(alpha, alpha).", above=0, example=0.2)
    classes: int | None = number("As dataset.classes.", min=1, example=10)


@describes("lockstep.data.batch_transforms.RandomErasing")
@dataclass
class RandomErasing:
    p: float = number("Probability that a rectangle is erased.", min=0, max=1, example=0.25)
    scale: list[float] = number(
        "Least and largest area, as a share of the image.", min=0, max=1, length=2, example=[0.02, 0.33]
    )
    ratio: list[float] = number("Least and largest height over width.", above=0, length=2, example=[0.3, 3.3])
