"""Figures as images, drawn with Pillow, which torchvision and TensorBoard bring along."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

WHITE, BLACK, GREY = (255, 255, 255), (0, 0, 0), (120, 120, 120)
RIGHT, WRONG = (27, 120, 55), (178, 24, 43)  # told apart by people who do not tell green from red, too
WIDTH = 350  # pixels of TensorBoard's cards, which leave out rows and columns of larger images: text would be illegible
TILE, LINE, GAP, COLUMNS = 80, 15, 6, 4  # side by side they have this width
MARGIN = 60
LARGEST = 640  # pixels of the bars of many classes
FEWEST_CELLS = 8  # in the width of a matrix

Colour = tuple[int, int, int]

Image.preinit()  # otherwise the first image that is written imports its format: in a sweep, again in each job


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
        _text(draw, left, top + TILE, tile.prediction, RIGHT if tile.is_right else WRONG)
        _text(draw, left, top + TILE + LINE, tile.truth, BLACK)
    return _tensor(canvas)


def draw_confusion(counts: Sequence[Sequence[float]], names: Sequence[str]) -> Tensor:
    """A row for each true class, a column for each predicted one. A colour is a share of its row."""
    cell = max(3, (WIDTH - MARGIN - GAP) // max(len(names), FEWEST_CELLS))
    side = cell * len(names)
    canvas, draw = _canvas(max(WIDTH, MARGIN + side + GAP), MARGIN + side + GAP)
    _text(draw, GAP, GAP, "row: truth   column: prediction", GREY)
    for row, (name, line) in enumerate(zip(names, counts, strict=True)):
        top, total = MARGIN + row * cell, sum(line) or 1.0
        if cell >= LINE:
            _text(draw, GAP, top + (cell - LINE) // 2, name[:8], BLACK)
            _text(draw, MARGIN + row * cell + 4, MARGIN - LINE - 2, name[: cell // 7], BLACK)
        for column, count in enumerate(line):
            left = MARGIN + column * cell
            colour = _shade(RIGHT if row == column else WRONG, count / total)
            draw.rectangle((left, top, left + cell - 1, top + cell - 1), colour, GREY if cell >= LINE else None)
            if count and cell >= 24:
                _text(draw, left + 2, top + (cell - LINE) // 2, f"{count:.0f}", WHITE if count > total / 2 else BLACK)
    return _tensor(canvas)


def draw_accuracies(accuracies: Sequence[float | None], names: Sequence[str]) -> Tensor:
    """A bar for each class, from 0 to 1. None: no test sample of this class."""
    height = max(3, min(20, LARGEST // len(names)))
    length = WIDTH - 2 * MARGIN
    canvas, draw = _canvas(MARGIN + length + MARGIN, height * len(names) + 2 * GAP)
    for number, (name, accuracy) in enumerate(zip(names, accuracies, strict=True)):
        top, share = GAP + number * height, accuracy or 0.0
        draw.rectangle((MARGIN, top, MARGIN + length, top + height - 2), _shade(GREY, 0.15))
        if share > 0:
            draw.rectangle((MARGIN, top, MARGIN + length * share, top + height - 2), RIGHT)
        if height >= LINE:
            _text(draw, GAP, top, name[:8], BLACK)
            _text(draw, MARGIN + length + 4, top, "-" if accuracy is None else f"{accuracy:.1%}", BLACK)
    return _tensor(canvas)


def draw_points(points: Sequence[tuple[float, float]]) -> Tensor:
    """A point for each (predicted, true), and the line on which both are equal."""
    side = WIDTH - MARGIN - GAP
    canvas, draw = _canvas(MARGIN + side + GAP, side + MARGIN)
    low, high = min(map(min, points)), max(map(max, points))
    scale = side / ((high - low) or 1.0)
    draw.rectangle((MARGIN, 0, MARGIN + side, side), None, GREY)
    draw.line((MARGIN, side, MARGIN + side, 0), RIGHT)
    for predicted, true in points:
        x, y = MARGIN + (true - low) * scale, side - (predicted - low) * scale
        draw.ellipse((x - 2, y - 2, x + 2, y + 2), WRONG)
    _text(draw, MARGIN, side + 4, f"true, {low:.4g} to {high:.4g}", BLACK)
    _text(draw, GAP, GAP, "predicted", BLACK)
    return _tensor(canvas)


def _canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    canvas = Image.new("RGB", (int(width), int(height)), WHITE)
    return canvas, ImageDraw.Draw(canvas)


def _text(draw: ImageDraw.ImageDraw, left: float, top: float, words: str, colour: Colour) -> None:
    draw.text((left, top), words, fill=colour, font=_font())


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
