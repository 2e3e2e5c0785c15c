"""The options of the group mode: the keys of their YAML. As `options.py`."""

from dataclasses import dataclass

from lockstep.config.fields import LARGEST_SEED, choice, number, value
from lockstep.config.options import NoKeys, describes

describes("lockstep.modes.train.Train", "mode/train")(NoKeys)
describes("lockstep.modes.check.Check", "mode/check")(NoKeys)


@dataclass
class Trained:
    """A mode that uses the weights of a run."""

    snapshot: str = value("The weights to use: last, best, or a snapshot's file.", example="best")


@describes("lockstep.modes.evaluate.Evaluate", "mode/evaluate")
@dataclass
class Evaluate(Trained):
    split: str = choice("test", "train", help="The data to evaluate; training data is not augmented.")
    file: str | None = value("Where the numbers go; null: evaluation.json in the run folder.", example="numbers.json")


@describes("lockstep.modes.predict.Predict", "mode/predict")
@dataclass
class Predict(Trained):
    split: str = choice("test", "train", help="The data to predict; training data is not augmented.")
    file: str | None = value("Where the rows go; null: predictions.csv in the run folder.", example="rows.csv")


@describes("lockstep.modes.export.Export", "mode/export")
@dataclass
class Export(Trained):
    format: str = choice("torch_export", "onnx", "safetensors", "state_dict", help="What the file is.")
    file: str | None = value("Where the net goes; null: last.pt2, best.onnx, ... in the run.", example="net.onnx")


@describes("lockstep.modes.sample.Sample", "mode/sample")
@dataclass
class Sample(Trained):
    prompt: str = value("The text goes on from here.", example="ROMEO:")
    length: int = number("Tokens to write.", min=1, example=500)
    temperature: float = number(
        "Below 1 likely tokens are drawn more often; 0: always the likeliest.", min=0, example=0.8
    )
    top_k: int | None = number("Draw from the k likeliest tokens only.", min=1, example=40)
    seed: int = number("Seed of what is drawn.", min=0, max=LARGEST_SEED, example=0)
