"""What a task draws of the samples of an evaluation, with Pillow, which torchvision and TensorBoard bring along."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from lockstep.tasks.base import ReadSample, Samples

MOST_CLASSES = 200  # for a confusion matrix
MOST_POINTS = 1000  # of a regression

BLACK, GREY = (0, 0, 0), (120, 120, 120)
RIGHT, WRONG = (27, 120, 55), (178, 24, 43)  # told apart by people who do not tell green from red, too
WIDTH = 350  # pixels of TensorBoard's cards, which leave out rows and columns of larger images: text would be illegible
TILE, LINE, GAP, COLUMNS = 80, 15, 6, 4  # side by side they have this width
MARGIN, LARGEST = 110, 30  # for the names of classes, and of a cell
LETTERS = 12  # that fit below a tile

FONT = ImageFont.load_default(12)
Image.preinit()  # otherwise the first image that is written imports its format: in a sweep, again in each job


def class_figures(samples: Samples, read: ReadSample, classes: Sequence[str], images: int) -> dict[str, Tensor]:
    """The samples that a classifier is most wrong about, mistakes first, and how often a class was taken for which."""
    known = ((samples["target"] >= 0) & (samples["prediction"] >= 0)).nonzero().flatten()  # NaN is none of both
    if not len(known):
        return {}
    numbers, loss = samples["number"][known].tolist(), samples["loss"][known]
    target, prediction = samples["target"][known].long(), samples["prediction"][known].long()
    count = max(len(classes), int(torch.maximum(target, prediction).max()) + 1)
    names, figures = [*classes, *map(str, range(len(classes), count))], {}
    worst = np.lexsort((-loss.numpy(), (target == prediction).numpy()))[:images].tolist()
    shown = [(read(numbers[one]), names[prediction[one]], names[target[one]]) for one in worst]
    if shown[0][0].dim() == 3 and len(shown[0][0]) in (1, 3):
        figures["worst_first"] = draw_tiles(shown)
    if count <= MOST_CLASSES:
        pairs = torch.bincount(target * count + prediction, minlength=count**2)
        figures["confusion_matrix"] = draw_confusion(pairs.view(count, count), names)
    return figures


def value_figures(samples: Samples) -> dict[str, Tensor]:
    """Predicted against true values, of every n-th sample, and the line on which both are equal."""
    points = torch.stack([samples["target"], samples["prediction"]], 1)
    points = points[points.isfinite().all(1)]
    if not len(points):
        return {}
    points = points[:: -(-len(points) // MOST_POINTS)]
    canvas, draw = _canvas(WIDTH + LINE)
    low, high = float(points.min()), float(points.max())
    draw.text((GAP, 0), f"predicted (upwards) against true, {low:.4g} to {high:.4g}", GREY, FONT)
    draw.line((0, WIDTH + LINE, WIDTH, LINE), RIGHT)
    for x, y in ((points - low) * (WIDTH / ((high - low) or 1.0))).tolist():
        draw.ellipse((x - 2, WIDTH + LINE - y - 2, x + 2, WIDTH + LINE - y + 2), WRONG)
    return {"predicted_against_true": _tensor(canvas)}


def draw_tiles(tiles: Sequence[tuple[Tensor, str, str]]) -> Tensor:
    """A grid of (sample, predicted class, true class), row by row: under each image stand both names.

    Floats are stretched to the whole range: they may be normalised."""
    height = TILE + 2 * LINE + GAP
    canvas, draw = _canvas(-(-len(tiles) // COLUMNS) * height + GAP)
    for number, (sample, predicted, true) in enumerate(tiles):
        left, top, values = GAP + number % COLUMNS * (TILE + GAP), GAP + number // COLUMNS * height, sample.cpu()
        if values.dtype != torch.uint8:
            values = values.double() - values.min()
            values = (values * (255 / values.max().clamp(min=1e-12))).to(torch.uint8)
        picture = Image.fromarray(values.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
        canvas.paste(picture.resize((TILE, TILE), Image.Resampling.NEAREST), (left, top))
        draw.text((left, top + TILE), predicted[:LETTERS], RIGHT if predicted == true else WRONG, FONT)
        draw.text((left, top + TILE + LINE), f"is {true}"[:LETTERS], BLACK, FONT)
    return _tensor(canvas)


def draw_confusion(counts: Tensor, names: Sequence[str]) -> Tensor:
    """A row for each true class, a column for each predicted one. A colour is a share of its row, with numbers where
    they have room."""
    size = min(LARGEST, max(1, (WIDTH - MARGIN) // len(names)))
    canvas, draw = _canvas(LINE + size * len(names) + GAP)
    draw.text((GAP, 0), "row: truth, and its % right   column: prediction", GREY, FONT)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    for row, (name, line) in enumerate(zip(names, shares.tolist(), strict=True)):
        top = LINE + row * size
        if size >= LINE:
            draw.text((GAP, top), f"{int(100 * line[row])}% {name}", BLACK, FONT)
        for column, share in enumerate(line):  # over what is too long of a name
            colour, left = RIGHT if row == column else WRONG, MARGIN + column * size
            shade = tuple(round(255 + (part - 255) * share**0.5) for part in colour)  # small shares can be seen, too
            draw.rectangle((left, top, left + size - 1, top + size - 1), shade)
            if share and size >= LINE:
                draw.text((left + 2, top), str(int(counts[row, column])), "white" if share > 0.5 else "black", FONT)
    return _tensor(canvas)


def _canvas(height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    canvas = Image.new("RGB", (WIDTH, height), "white")
    return canvas, ImageDraw.Draw(canvas)


def _tensor(canvas: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(canvas)).permute(2, 0, 1).float() / 255
