"""What evaluations show as images: the worst mistakes, the confusion matrix, predicted against true values."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from lockstep.distributed.world import join_world
from lockstep.tasks.reports import (
    RIGHT,
    ClassReport,
    Tile,
    ValueReport,
    draw_confusion,
    draw_tiles,
)
from support.configs import composed, with_values
from support.event_files import images
from support.worlds import in_world, train_all

pytestmark = pytest.mark.whole

SAMPLES, CLASSES = 101, 4


def outputs_and_targets() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(SAMPLES, CLASSES, generator=generator)
    return outputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def class_report() -> tuple[list[list[float]], list[tuple[int, int, int, float]]]:
    """The confusion matrix and the shown samples, as this rank has them at the end."""
    outputs, targets = outputs_and_targets()
    with join_world("gloo", 60) as world:
        report = ClassReport("test", images=60)
        for rows in torch.arange(SAMPLES)[world.rank :: world.size].split(7):
            report.add(outputs[rows], targets[rows], rows)
        report.reduce(world)
        assert report.confusion is not None
        shown = [(one.number, one.prediction, one.truth, one.confidence) for one in report.shown]
        return report.confusion.tolist(), shown


@pytest.mark.parametrize("ranks", [1, 3])
def test_mistakes_come_first_and_every_sample_is_counted_once(ranks: int) -> None:
    outputs, targets = outputs_and_targets()
    confidences, predictions = (column.tolist() for column in outputs.softmax(1).max(1))
    expected = Counter(zip(targets.tolist(), predictions, strict=True))
    is_right = [prediction == truth for prediction, truth in zip(predictions, targets.tolist(), strict=True)]
    surest = sorted(range(SAMPLES), key=lambda n: (is_right[n], confidences[n] if is_right[n] else -confidences[n]))
    for confusion, shown in in_world(ranks, class_report):
        assert confusion == [[expected[truth, guess] for guess in range(CLASSES)] for truth in range(CLASSES)]
        assert [number for number, _, _, _ in shown] == surest[:60]
        for number, prediction, truth, confidence in shown:
            assert (prediction, truth) == (predictions[number], int(targets[number]))
            assert confidence == pytest.approx(confidences[number])


def value_points() -> list[list[float]]:
    with join_world("gloo", 60) as world:
        report = ValueReport("test", 2500)
        for rows in torch.arange(2500)[world.rank :: world.size].split(100):
            report.add(rows[:, None] + 0.5, rows[:, None].float(), rows)
        report.reduce(world)
        return report.points.tolist()


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_third_value_of_2500_is_shown_at_any_number_of_ranks(ranks: int) -> None:
    for points in in_world(ranks, value_points):
        assert points == [[number + 0.5, number] for number in range(0, 2500, 3)]


def test_a_cell_has_the_colour_of_its_share_and_a_tile_the_pixels_of_its_sample() -> None:
    matrix = draw_confusion([[4.0, 0.0], [0.0, 0.0]], ["cat", "dog"])
    green = ((matrix - torch.tensor(RIGHT)[:, None, None] / 255).abs().sum(0) < 0.01).nonzero()
    (top, left), cell = green.amin(0).tolist(), 35
    assert green.amax(0).tolist() == [top + cell - 3, left + cell - 3]  # without its frame
    for row, column in ((0, 1), (1, 0), (1, 1)):
        assert bool((matrix[:, top + cell * row :, left + cell * column :][:, : cell - 2, : cell - 2] == 1).all())
    beside = matrix[:, :, left + 2 * cell :] < 0.5
    assert int(beside[:, top : top + cell].sum()) > int(beside[:, top + cell :].sum()) > 0  # 100 and -
    sample = torch.arange(64, dtype=torch.uint8).view(1, 8, 8)
    tile = draw_tiles([Tile(sample, "1 (90%)", "is 2", False)])
    pixels = tile[0, 6 : 6 + 80, 6 : 6 + 80].mul(255).round().to(torch.uint8)
    assert torch.equal(pixels[5::10, 5::10], sample[0])


BREEDS = ["American_bulldog", "American_pit_bull_terrier", "cat", *(f"English_breed_number_{n}" for n in range(10))]


def test_long_names_stay_inside_their_tile_their_row_and_their_column() -> None:
    """The pixels between two tiles, and those between names and matrix, are white; no two names look alike."""
    tiles = draw_tiles([Tile(torch.zeros(1, 8, 8), f"99% {name}", f"is {name}", False) for name in BREEDS])
    for gap in range(3):
        left = 6 + 80 + gap * 86
        assert bool((tiles[:, :, left : left + 6] == 1).all())
    counts = [[1234.0 if row == column else 0.0 for column in range(13)] for row in range(13)]
    matrix = draw_confusion(counts, BREEDS)
    left, cell = 116, (350 - 116 - 33) // 13
    assert matrix.shape[2] == 350
    top = matrix.shape[1] - 6 - 13 * cell
    assert bool((matrix[:, top:, left - 6 : left] == 1).all())
    rows = [matrix[:, top + cell * row :, 6 : left - 6][:, :cell].flatten().tolist() for row in range(13)]
    columns = [matrix[:, 27 : top - 1, left + cell * row :][:, :, :cell].flatten().tolist() for row in range(13)]
    assert len(set(map(tuple, rows))) == len(set(map(tuple, columns))) == 13


def test_a_run_draws_its_last_evaluation_and_the_option_says_how_much(tmp_path: Path) -> None:
    short = ["model=linear", "trainer.epochs=2", "logger=[tensorboard]"]
    counts = [f"logger.tensorboard.images={count}" for count in (0, 4, 25)]
    base = composed(*short, whole=False)
    in_world(2, train_all, [with_values(base, f"run_dir={tmp_path / key.rpartition('=')[2]}", key) for key in counts])
    sizes = {}
    for count in (0, 4, 25):
        sizes[count] = {tag: image.size for tag, (_, image) in images(tmp_path / str(count)).items()}
    assert sizes[0] == {}
    assert sizes[25].keys() == {
        f"{split}/{what}" for split in ("val", "test") for what in ("worst_first", "confusion_matrix")
    }
    assert sizes[25]["test/worst_first"][1] > 4 * sizes[4]["test/worst_first"][1]
    step, matrix = images(tmp_path / "25")["test/confusion_matrix"]
    assert step == 42
    assert isinstance(matrix, Image.Image)


def test_a_regression_shows_its_values(tmp_path: Path) -> None:
    options = ["dataset=random", "dataset.samples=64", "model=linear", "trainer.max_steps=1", "logger=[tensorboard]"]
    in_world(1, train_all, [composed(*options, f"run_dir={tmp_path}")])
    assert images(tmp_path).keys() == {"test/predicted_against_true"}
