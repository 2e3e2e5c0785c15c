"""What a classifier's evaluation shows as images, drawn with Pillow, which torchvision and TensorBoard bring along."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from lockstep.tasks.base import ReadSample, Samples

RIGHT, WRONG = (27, 120, 55), (178, 24, 43)  # told apart by people who do not tell green from red, too
WIDTH = 350  # pixels of TensorBoard's cards, which leave out rows and columns of larger images: text would be illegible
TILE, LINE, GAP, COLUMNS = 80, 15, 6, 4  # side by side they have this width
MARGIN, LETTERS = 110, 12  # for the names of classes, of which so many fit below a tile
FONT = ImageFont.load_default(12)


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
    if count <= WIDTH - MARGIN:
        pairs = torch.bincount(target * count + prediction, minlength=count**2)
        figures["confusion_matrix"] = draw_confusion(pairs.view(count, count), names)
    return {name: torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 for name, image in figures.items()}


def draw_tiles(tiles: Sequence[tuple[Tensor, str, str]]) -> Image.Image:
    """A grid of (sample, predicted class, true class), row by row: under each image stand both names."""
    height = TILE + 2 * LINE + GAP
    canvas = Image.new("RGB", (WIDTH, -(-len(tiles) // COLUMNS) * height + GAP), "white")
    draw = ImageDraw.Draw(canvas)
    for number, (sample, predicted, true) in enumerate(tiles):
        left, top = GAP + number % COLUMNS * (TILE + GAP), GAP + number // COLUMNS * height
        values = sample.cpu().double() - float(sample.min())
        pixels = (values * (255 / values.max().clamp(min=1e-12))).to(torch.uint8)  # they may be normalised
        picture = Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
        canvas.paste(picture.resize((TILE, TILE), Image.Resampling.NEAREST), (left, top))
        draw.text((left, top + TILE), predicted[:LETTERS], RIGHT if predicted == true else WRONG, FONT)
        draw.text((left, top + TILE + LINE), f"is {true}"[:LETTERS], "black", FONT)
    return canvas


def draw_confusion(counts: Tensor, names: Sequence[str]) -> Image.Image:
    """A row for each true class, after its name and the share that is right, and a column for each predicted one. The
    darker a cell, the larger its share of the row; with numbers where they have room."""
    size = (WIDTH - MARGIN) // len(names)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    cells = Image.fromarray((255 - 255 * shares.sqrt()).to(torch.uint8).numpy())  # small shares can be seen, too
    canvas = Image.new("RGB", (WIDTH, size * len(names)), "white")
    canvas.paste(cells.resize((size * len(names),) * 2, Image.Resampling.NEAREST), (MARGIN, 0))
    draw = ImageDraw.Draw(canvas)
    for row, name in enumerate(names if size >= LINE else ()):
        draw.text((GAP, row * size), f"{int(100 * shares[row, row])}% {name}"[:LETTERS], "black", FONT)
        for column in counts[row].nonzero().flatten().tolist():
            colour, place = "white" if shares[row, column] > 0.3 else "black", (MARGIN + column * size + 2, row * size)
            draw.text(place, str(int(counts[row, column])), colour, FONT)
    return canvas
