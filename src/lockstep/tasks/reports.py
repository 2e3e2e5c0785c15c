"""What an evaluation shows beside its means, drawn with Pillow, which torchvision and TensorBoard bring along.

Of a classifier: the worst mistakes, and the confusion matrix with the accuracy of each class. Of a regression:
predicted against true values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from lockstep.distributed.backend import float64_device
from lockstep.distributed.world import World
from lockstep.tasks.base import ReadSample, Report, as_float64, at_least_float32

MOST_CLASSES = 200  # for a confusion matrix
ROW = 5  # numbers of a row of the table of shown samples: score, number, prediction, truth, confidence
MOST_POINTS = 1000  # of a regression

WHITE, BLACK, GREY = (255, 255, 255), (0, 0, 0), (120, 120, 120)
RIGHT, WRONG = (27, 120, 55), (178, 24, 43)  # told apart by people who do not tell green from red, too
WIDTH = 350  # pixels of TensorBoard's cards, which leave out rows and columns of larger images: text would be illegible
TILE, LINE, GAP, COLUMNS = 80, 15, 6, 4  # side by side they have this width
MARGIN = 60  # for numbers beside a picture
LARGEST = 640  # pixels of what shows many classes
FEWEST_CELLS = 8  # in the width of a matrix

Colour = tuple[int, int, int]

Image.preinit()  # otherwise the first image that is written imports its format: in a sweep, again in each job


@dataclass(frozen=True)
class Shown:
    """A test sample in the grid. number: in the data set. confidence: the probability of the prediction."""

    number: int
    prediction: int
    truth: int
    confidence: float


class ClassReport(Report):
    """Counts (truth, prediction) pairs, and keeps the samples that the model is most wrong about.

    First come mistakes, those of the highest confidence first, then correct predictions, the lowest confidence first.
    confusion: (classes, classes), how often a class (row) was taken for a class (column); None if there are too many.
    """

    def __init__(self, split: str, images: int) -> None:
        self.split, self.images = split, images
        self.confusion: Tensor | None = None
        self.worst: Tensor | None = None  # (at most `images`, ROW) float64
        self.shown: list[Shown] = []

    def add(self, outputs: Tensor, targets: Tensor, numbers: Tensor) -> None:
        if outputs.shape[:1] + outputs.shape[2:] != targets.shape or targets.is_floating_point():
            return  # a task of the user's that is derived from Classification may have other targets
        confidence, prediction = at_least_float32(outputs).softmax(dim=1).max(dim=1)
        if outputs.shape[1] <= MOST_CLASSES:
            counts = _confusion(prediction.flatten(), targets.flatten(), outputs.shape[1])
            self.confusion = counts if self.confusion is None else self.confusion + counts
        if targets.dim() == 1:
            self._keep_worst(confidence, prediction, targets, numbers.to(targets.device))

    def _keep_worst(self, confidence: Tensor, prediction: Tensor, targets: Tensor, numbers: Tensor) -> None:
        score = torch.where(prediction == targets, 1 - confidence, 1 + confidence)
        is_class = targets >= 0  # others, such as -100, become empty rows: to drop them would wait for a GPU
        score, confidence = score * is_class, confidence * is_class
        rows = torch.stack([as_float64(column) for column in (score, numbers, prediction, targets, confidence)], dim=1)
        if self.worst is not None:
            rows = torch.cat([self.worst, rows])
        self.worst = rows[rows[:, 0].topk(min(self.images, len(rows))).indices]

    def reduce(self, world: World) -> None:
        """One all-reduce: each rank's worst samples in a row of their own, and the sum of the counts."""
        classes = max(world.all_gather_json(0 if self.confusion is None else len(self.confusion)))
        table = torch.zeros(world.size, self.images, ROW, dtype=torch.float64, device=float64_device(world.device))
        if self.worst is not None:
            table[world.rank, : len(self.worst)] = self.worst
        counts = torch.zeros(classes, classes, dtype=torch.float64, device=float64_device(world.device))
        if self.confusion is not None:
            counts += self.confusion
        both = world.all_reduce_sum(torch.cat([table.flatten(), counts.flatten()])).cpu()
        rows = both[: table.numel()].view(-1, ROW).tolist()
        # A row of zeros is empty. Equal scores are in the order of the samples, at any number of ranks.
        worst = sorted((row for row in rows if row[-1] > 0), key=lambda row: (-row[0], row[1]))
        self.shown = [Shown(int(row[1]), int(row[2]), int(row[3]), row[4]) for row in worst[: self.images]]
        self.confusion = both[table.numel() :].view(classes, classes) if classes else None

    def figures(self, sample: ReadSample, classes: Sequence[str]) -> dict[str, Tensor]:
        figures = {}
        if self.shown and is_image(sample(self.shown[0].number)):
            tiles = [
                Tile(
                    sample(shown.number),
                    f"{shown.confidence:.0%} {_name(classes, shown.prediction)}",
                    f"is {_name(classes, shown.truth)}",
                    shown.prediction == shown.truth,
                )
                for shown in self.shown
            ]
            figures[f"{self.split}/worst_first"] = draw_tiles(tiles)
        if self.confusion is not None and self.confusion.sum() > 0:
            names = [_name(classes, number) for number in range(len(self.confusion))]
            figures[f"{self.split}/confusion_matrix"] = draw_confusion(self.confusion.tolist(), names)
        return figures


def _confusion(predictions: Tensor, targets: Tensor, classes: int) -> Tensor:
    """(classes, classes) counts. Targets that are no class, such as -100, are left out.

    A product of matrices: bincount would wait for a GPU. Counts below 2**24 are exact in float32.
    """
    numbers = torch.arange(classes, device=targets.device)
    truths, guesses = (targets[:, None] == numbers).float(), (predictions[:, None] == numbers).float()
    return as_float64(truths.T @ guesses)


def _name(classes: Sequence[str], number: int) -> str:
    return classes[number] if 0 <= number < len(classes) else str(number)


class ValueReport(Report):
    """Keeps the first value of every n-th test sample, so that there are at most MOST_POINTS.

    points: (points, 2), predicted and true. They are the same samples at any number of ranks.
    """

    def __init__(self, split: str, samples: int) -> None:
        self.split = split
        self.every = max(1, -(-samples // MOST_POINTS))
        self.points = torch.zeros(-(-samples // self.every), 2, dtype=torch.float64)

    def add(self, outputs: Tensor, targets: Tensor, numbers: Tensor) -> None:
        rows = (numbers % self.every == 0).nonzero().flatten()
        values = [_first_values(one)[rows.to(one.device)].cpu().double() for one in (outputs, targets)]
        self.points[numbers[rows] // self.every] = torch.stack(values, 1)

    def reduce(self, world: World) -> None:
        self.points = world.all_reduce_sum(self.points.to(float64_device(world.device))).cpu()

    def figures(self, sample: ReadSample, classes: Sequence[str]) -> dict[str, Tensor]:
        points = [(predicted, true) for predicted, true in self.points[self.points.isfinite().all(1)].tolist()]
        return {f"{self.split}/predicted_against_true": draw_points(points)} if points else {}


def _first_values(values: Tensor) -> Tensor:
    """(N, ...) -> (N,)."""
    return values.flatten(1)[:, 0] if values.dim() > 1 else values


@dataclass(frozen=True)
class Tile:
    """A test sample, what the model says, and what is true."""

    sample: Tensor
    prediction: str
    truth: str
    is_right: bool


def is_image(sample: Tensor) -> bool:
    return sample.dim() == 3 and sample.shape[0] in (1, 3)


def draw_tiles(tiles: Sequence[Tile]) -> Tensor:
    """A grid, row by row. Under each image stand the prediction and the truth."""
    rows = -(-len(tiles) // COLUMNS)
    height = TILE + 2 * LINE + GAP
    canvas, draw = _canvas(WIDTH, rows * height + GAP)
    for number, tile in enumerate(tiles):
        left, top = GAP + number % COLUMNS * (TILE + GAP), GAP + number // COLUMNS * height
        canvas.paste(_picture(tile.sample), (left, top))
        _text(draw, left, top + TILE, _cut(tile.prediction, TILE), RIGHT if tile.is_right else WRONG)
        _text(draw, left, top + TILE + LINE, _cut(tile.truth, TILE), BLACK)
    return _tensor(canvas)


def draw_confusion(counts: Sequence[Sequence[float]], names: Sequence[str]) -> Tensor:
    """A row for each true class, a column for each predicted one. A colour is a share of its row.

    With names, and the share of a class that is right, where they have room in an image of up to LARGEST pixels: a
    click on TensorBoard's card shows it whole.
    """
    count_of_classes, margin, shares = len(names), _margin(names), int(_length("100")) + 2 * GAP
    cell = (WIDTH - margin - shares) // max(count_of_classes, FEWEST_CELLS)
    if cell < LINE <= (LARGEST - margin - shares) // count_of_classes:
        cell = LINE
    is_named = cell >= LINE
    if not is_named:
        margin, shares, cell = GAP, GAP, max(3, (WIDTH - 2 * GAP) // count_of_classes)
    side, room = cell * count_of_classes, cell - 1
    is_upright = is_named and max(map(_length, names)) > room  # the names of columns
    head = LINE + GAP + (margin if is_upright else LINE if is_named else 0)
    canvas, draw = _canvas(max(WIDTH, margin + side + shares), head + side + GAP)
    _text(draw, GAP, GAP // 2, f"row: truth   column: prediction{'   on the right: % right' if is_named else ''}", GREY)
    for row, (name, line) in enumerate(zip(names, counts, strict=True)):
        top, total = head + row * cell, sum(line) or 1.0
        for column, count in enumerate(line):
            left, words = margin + column * cell, f"{count:.0f}"
            colour = _shade(RIGHT if row == column else WRONG, count / total)
            draw.rectangle((left, top, left + cell - 1, top + cell - 1), colour, GREY if is_named else None)
            if count and is_named and (length := _length(words)) <= room:
                ink = WHITE if count > total / 2 else BLACK
                _text(draw, left + (cell - length) / 2, top + (cell - LINE) // 2, words, ink)
        if not is_named:
            continue
        left, name = margin + row * cell, _cut(name, margin - 2 * GAP)
        _text(draw, GAP, top + (cell - LINE) // 2, name, BLACK)
        share = f"{100 * line[row] // total:.0f}" if sum(line) else "-"  # 100 only if all are right
        _text(draw, margin + side + GAP, top + (cell - LINE) // 2, share, BLACK)
        if is_upright:
            upright = Image.new("RGB", (margin - 2 * GAP, LINE), WHITE)
            _text(ImageDraw.Draw(upright), 0, 0, name, BLACK)
            place = left + (cell - LINE) // 2, head - upright.width - 2
            canvas.paste(upright.transpose(Image.Transpose.ROTATE_90), place)
        else:
            _text(draw, left + (cell - _length(name)) / 2, head - LINE - 2, name, BLACK)
    return _tensor(canvas)


def draw_points(points: Sequence[tuple[float, float]]) -> Tensor:
    """A point for each (predicted, true), and the line on which both are equal."""
    side = WIDTH - MARGIN - GAP
    canvas, draw = _canvas(WIDTH, side + GAP + 2 * LINE)
    low, high = min(map(min, points)), max(map(max, points))
    scale = side / ((high - low) or 1.0)
    draw.rectangle((MARGIN, GAP, MARGIN + side, GAP + side), None, GREY)
    draw.line((MARGIN, GAP + side, MARGIN + side, GAP), RIGHT)
    for predicted, true in points:
        x, y = MARGIN + (true - low) * scale, GAP + side - (predicted - low) * scale
        draw.ellipse((x - 2, y - 2, x + 2, y + 2), WRONG)
    for place, words in ((0.0, f"{low:.4g}"), (0.5, "true"), (1.0, f"{high:.4g}")):
        _text(draw, MARGIN + place * (side - _length(words)), GAP + side + 4, words, BLACK)
    for place, words in ((0.0, f"{low:.4g}"), (0.5, "predicted"), (1.0, f"{high:.4g}")):
        _text(draw, MARGIN - 4 - _length(words), GAP + (1 - place) * (side - LINE), words, BLACK)
    return _tensor(canvas)


def _canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    canvas = Image.new("RGB", (int(width), int(height)), WHITE)
    return canvas, ImageDraw.Draw(canvas)


def _text(draw: ImageDraw.ImageDraw, left: float, top: float, words: str, colour: Colour) -> None:
    draw.text((left, top), words, fill=colour, font=_font())


def _length(words: str) -> float:
    return _font().getlength(words)


def _margin(names: Sequence[str]) -> int:
    """Pixels for the names of classes: up to a third of the width."""
    return min(WIDTH // 3, int(max(map(_length, names))) + 1 + 2 * GAP)


def _cut(words: str, room: float) -> str:
    """At most `room` pixels of text, cut in the middle: names of classes often begin alike."""
    kept, shown = len(words), words
    while _length(shown) > room and kept > 2:
        kept -= 1
        shown = f"{words[: kept - kept // 2]}…{words[len(words) - kept // 2 :]}"
    return shown


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Read once: unpacking it takes as long as writing with it."""
    return ImageFont.load_default(12)


def _shade(colour: Colour, share: float) -> Colour:
    """From white at 0 to `colour` at 1. Small shares can be seen, too."""
    strength = share**0.5
    red, green, blue = (round(255 + (part - 255) * strength) for part in colour)
    return red, green, blue


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
