"""What a task draws of the samples of an evaluation, with Pillow, which torchvision and TensorBoard bring along."""

from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from lockstep.tasks.base import ReadSample, Samples

MOST_CLASSES = 200  # for a confusion matrix
MOST_POINTS = 1000  # of a regression

WHITE, BLACK, GREY = (255, 255, 255), (0, 0, 0), (120, 120, 120)
RIGHT, WRONG = (27, 120, 55), (178, 24, 43)  # told apart by people who do not tell green from red, too
WIDTH = 350  # pixels of TensorBoard's cards, which leave out rows and columns of larger images: text would be illegible
TILE, LINE, GAP, COLUMNS = 80, 15, 6, 4  # side by side they have this width
MARGIN = 110  # for the names of classes
FEWEST_CELLS = 8  # in the width of a matrix

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
    order = loss.argsort(descending=True, stable=True)
    worst = order[(target == prediction)[order].long().argsort(stable=True)][:images].tolist()
    if is_image(read(numbers[worst[0]])):
        figures["worst_first"] = draw_tiles(
            [(read(numbers[one]), names[prediction[one]], names[target[one]]) for one in worst]
        )
    if count <= MOST_CLASSES:
        pairs = torch.bincount(target * count + prediction, minlength=count**2)
        figures["confusion_matrix"] = draw_confusion(pairs.view(count, count), names)
    return figures


def value_figures(samples: Samples) -> dict[str, Tensor]:
    """Predicted against true values, of every n-th sample."""
    points = torch.stack([samples["target"], samples["prediction"]], 1)
    points = points[points.isfinite().all(1)]
    points = points[:: max(1, -(-len(points) // MOST_POINTS))]
    return {"predicted_against_true": draw_points(points)} if len(points) else {}


def is_image(sample: Tensor) -> bool:
    return sample.dim() == 3 and sample.shape[0] in (1, 3)


def draw_tiles(tiles: Sequence[tuple[Tensor, str, str]]) -> Tensor:
    """A grid of (sample, predicted class, true class), row by row: under each image stand both names."""
    height = TILE + 2 * LINE + GAP
    canvas, _ = _canvas(WIDTH, -(-len(tiles) // COLUMNS) * height + GAP)
    for number, (sample, predicted, true) in enumerate(tiles):
        tile, draw = _canvas(TILE, height - GAP)
        tile.paste(_picture(sample), (0, 0))
        _text(draw, 0, TILE, predicted, RIGHT if predicted == true else WRONG)
        _text(draw, 0, TILE + LINE, f"is {true}", BLACK)
        canvas.paste(tile, (GAP + number % COLUMNS * (TILE + GAP), GAP + number // COLUMNS * height))
    return _tensor(canvas)


def draw_confusion(counts: Tensor, names: Sequence[str]) -> Tensor:
    """A row for each true class, a column for each predicted one. A colour is a share of its row.

    With names, and the share of a class that is right, where they have room.
    """
    cell = max(3, (WIDTH - MARGIN) // max(len(names), FEWEST_CELLS))
    margin = MARGIN if cell >= LINE else GAP
    canvas, draw = _canvas(max(WIDTH, margin + cell * len(names) + GAP), LINE + cell * len(names) + GAP)
    _text(draw, GAP, 0, "row: truth, and its % right   column: prediction", GREY)
    for row, (name, line) in enumerate(zip(names, counts.tolist(), strict=True)):
        top, total = LINE + row * cell, max(1, sum(line))
        if cell >= LINE:
            _text(draw, GAP, top, f"{100 * line[row] // total}% {name}", BLACK)
        for column, count in enumerate(line):  # over what is too long of a name
            left, strength = margin + column * cell, (count / total) ** 0.5  # small shares can be seen, too
            shade = [round(255 + (part - 255) * strength) for part in (RIGHT if row == column else WRONG)]
            draw.rectangle((left, top, left + cell - 1, top + cell - 1), tuple(shade), GREY if cell >= LINE else None)
            if count and cell >= LINE:
                _text(draw, left + 2, top, str(count), WHITE if count > total / 2 else BLACK)
    return _tensor(canvas)


def draw_points(points: Tensor) -> Tensor:
    """A point for each (true, predicted), and the line on which both are equal."""
    canvas, draw = _canvas(WIDTH, WIDTH + LINE)
    low, high = float(points.min()), float(points.max())
    _text(draw, GAP, 0, f"predicted (upwards) against true, {low:.4g} to {high:.4g}", GREY)
    draw.line((0, WIDTH + LINE, WIDTH, LINE), RIGHT)
    for x, y in ((points - low) * (WIDTH / ((high - low) or 1.0))).tolist():
        draw.ellipse((x - 2, WIDTH + LINE - y - 2, x + 2, WIDTH + LINE - y + 2), WRONG)
    return _tensor(canvas)


def _canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    canvas = Image.new("RGB", (width, height), WHITE)
    return canvas, ImageDraw.Draw(canvas)


def _text(draw: ImageDraw.ImageDraw, left: float, top: float, words: str, colour: tuple[int, int, int]) -> None:
    draw.text((left, top), words, fill=colour, font=FONT)


def _picture(sample: Tensor) -> Image.Image:
    """TILE x TILE pixels. Floats are stretched to the whole range: they may be normalised."""
    values = sample.detach().cpu()
    if values.dtype != torch.uint8:
        values = values.double()
        low, high = values.min(), values.max()
        values = ((values - low) / (high - low).clamp(min=1e-12) * 255).to(torch.uint8)
    rows = values.expand(3, -1, -1).permute(1, 2, 0).contiguous()
    picture = Image.frombytes("RGB", (rows.shape[1], rows.shape[0]), rows.numpy().tobytes())
    return picture.resize((TILE, TILE), Image.Resampling.NEAREST)


def _tensor(canvas: Image.Image) -> Tensor:
    values = torch.frombuffer(bytearray(canvas.tobytes()), dtype=torch.uint8)
    return values.view(canvas.height, canvas.width, 3).permute(2, 0, 1).float() / 255
