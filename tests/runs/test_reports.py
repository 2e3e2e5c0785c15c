"""What evaluations show as images: the worst mistakes and the confusion matrix."""

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.distributed.world import join_world
from lockstep.tasks.reports import class_figures, draw_confusion, draw_tiles
from lockstep.tasks.tasks import CrossEntropy
from lockstep.training.evaluate import SampleResults
from support.configs import composed, with_values
from support.event_files import images
from support.worlds import in_world, train_all

SAMPLES, CLASSES = 101, 4


def outputs_and_targets():
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(SAMPLES, CLASSES, generator=generator)
    return outputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def sample_results():
    """The table of samples, which rank 0 has at the end."""
    (outputs, targets), task = outputs_and_targets(), CrossEntropy()
    with join_world("gloo", 60) as world:
        results = SampleResults(task, draws=True)
        for rows in torch.arange(SAMPLES)[world.rank :: world.size].split(7):
            results.add(task(outputs[rows], targets[rows]), outputs[rows], targets[rows], rows)
        results.gather(world)
        return {name: column.tolist() for name, column in results.columns.items()}


def test_the_table_has_every_sample_once():
    outputs, targets = outputs_and_targets()
    losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
    for ranks in (1, 3):
        columns, *others = in_world(ranks, sample_results)
        assert others == [{}] * (ranks - 1)
        assert columns["number"] == list(range(SAMPLES))
        assert columns["target"] == targets.tolist()
        assert columns["prediction"] == outputs.argmax(1).tolist()
        assert columns["loss"] == pytest.approx(losses.tolist())


def test_mistakes_come_first_and_those_of_the_largest_loss_before_others():
    columns = {"loss": [0.1, 0.5, 2.0, 0.9, 3.0, 1.0], "target": [0, 1, 1, 2, 0, float("nan")]}
    columns |= {"number": [2, 3, 5, 7, 8, 9], "prediction": [0, 1, 0, 2, 1, 1]}
    samples, read = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}, []
    figures = class_figures(samples, lambda number: read.append(number) or torch.zeros(1, 8, 8), ["a"], 4)
    assert figures.keys() == {"worst_first", "confusion_matrix"}
    assert read == [8, 5, 7, 3]


def test_a_cell_is_as_dark_as_its_share_and_a_tile_has_the_pixels_of_its_sample():
    names = ["cat", "a dog of a name longer than its margin"]
    matrix = np.asarray(draw_confusion(torch.tensor([[4, 0], [0, 0]]), names))
    assert (matrix[60, 170] == 0).all()
    assert (matrix[[60, 180, 180], [290, 170, 290]] == 255).all()
    sample = torch.arange(0, 256, 4, dtype=torch.uint8).view(1, 8, 8)
    tile = np.asarray(draw_tiles([(sample, "a class with a name longer than its tile", "b")]))
    pixels = tile[6 : 6 + 80, 6 : 6 + 80][5::10, 5::10]
    assert np.abs(pixels[..., 0] - sample[0].numpy() * (255 / 252)).max() <= 1
    assert (tile[:, 86:] == 255).all()


def test_a_run_draws_its_last_evaluation_and_the_option_says_how_much(tmp_path):
    base, counts = composed("model=linear", "trainer.epochs=2", "logger=[tensorboard]", whole=False), (0, 4, 25)
    words = [(f"run_dir={tmp_path / str(count)}", f"logger.tensorboard.images={count}") for count in counts]
    in_world(2, train_all, [with_values(base, *each) for each in words])
    none, few, all_25 = (images(tmp_path / str(count)) for count in counts)
    assert none == {}
    kinds = ("worst_first", "confusion_matrix")
    assert all_25.keys() == {f"{split}/{what}" for split in ("val", "test") for what in kinds}
    assert all_25["test/worst_first"][1].size[1] > 4 * few["test/worst_first"][1].size[1]
    step, matrix = all_25["test/confusion_matrix"]
    assert (step, isinstance(matrix, Image.Image)) == (42, True)
