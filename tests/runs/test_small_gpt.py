"""The small GPT has one process's numbers under every strategy, and where few tokens of a batch count."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.data.source import Splits, Tensors
from lockstep.data.text import Text
from support.configs import composed, with_values
from support.small_text import small_gpt
from support.worlds import distance, in_world, train_all, weights


@pytest.mark.parametrize("variant", ["gpt2", "modern"])
def test_the_gpt_has_one_processs_numbers_under_every_strategy(tmp_path: Path, variant: str) -> None:
    words = [f"model.variant={variant}"]
    base = composed(*small_gpt(tmp_path, *words))
    untied = with_values(base, "model.tied=false")
    alone = {"alone": base, "untied": untied}
    in_world(1, train_all, [with_values(cfg, f"run_dir={tmp_path / name}") for name, cfg in alone.items()])
    found = {"ddp": [], "virtual_ranks": [], "fsdp": [], "tensor_parallel": [], "pipeline": ["model.tied=false"]}
    own = {name: [f"strategy={name}", f"run_dir={tmp_path / name}", *more] for name, more in found.items()}
    in_world(2, train_all, [composed(*small_gpt(tmp_path, *words, *each)) for each in own.values()])
    for name in found:
        one = weights(tmp_path / ("untied" if name == "pipeline" else "alone"))
        assert distance(one, weights(tmp_path / name)) < 1e-11, name


class Uneven(Text):
    """Blocks of a text of which some have few tokens that count, and some none."""

    def splits(self) -> Splits:
        train, test, _ = super().splits()
        text = train.tokens[: 26 * self.block + 1].long()
        targets = text[1:].clone().view(26, self.block)
        for number, row in enumerate(targets):
            row[number % (self.block + 1) :] = -100
        return Splits(Tensors(text[:-1].view(26, self.block), targets, train.classes), test)


def test_uneven_ignored_labels_have_the_mean_over_tokens_at_any_number_of_ranks(tmp_path: Path) -> None:
    target = f"dataset._target_={__name__}.Uneven"
    base = composed(*small_gpt(tmp_path, target, "trainer.epochs=1", "trainer.max_grad_norm=null"))
    losses: dict[str, Any] = {}
    for name, ranks, steps in (("alone", 1, 1), ("accumulated", 1, 3), ("two", 2, 1)):
        words = [f"trainer.gradient_accumulation_steps={steps}", f"run_dir={tmp_path / name}"]
        (losses[name], *_) = in_world(ranks, train_all, [with_values(base, *words)])
        assert losses[name] == pytest.approx(losses["alone"], rel=1e-12)
        assert distance(weights(tmp_path / "alone"), weights(tmp_path / name)) < 1e-12


def test_the_speed_is_told_in_tokens_too(tmp_path: Path) -> None:
    in_world(1, train_all, [composed(*small_gpt(tmp_path, "logger=[csv,console]", f"run_dir={tmp_path / 'run'}"))])
    speeds: dict[str, list[float]] = {}
    with open(tmp_path / "run" / "metrics.csv") as file:
        for row in csv.DictReader(file):
            speeds.setdefault(row["tag"], []).append(float(row["value"]))
    assert speeds["speed/tokens_per_s"] == pytest.approx([8 * value for value in speeds["speed/samples_per_s"]])
    assert re.search(r"epoch 2/2 .* \d+ samples/s   \d+ tokens/s", (tmp_path / "run" / "train.log").read_text())
