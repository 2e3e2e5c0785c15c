"""A text as token numbers, the mean over counted tokens, and which GPT a pipeline takes."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lockstep.config.nodes import instantiate
from lockstep.data.text import check_text, held_out_text, read_text, training_text
from lockstep.errors import ConfigError
from lockstep.tasks.language_modelling import IGNORED, LanguageModelling
from support.configs import composed
from support.small_text import WORDS, small_gpt, written

TASK = LanguageModelling({"loss": "min", "perplexity": "min"}, "loss")


def test_the_mean_is_over_the_tokens_that_count() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[1, IGNORED, 4], [IGNORED, IGNORED, 0]])
    loss, sums = TASK(logits, targets)
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    count = TASK.count(targets)
    assert count == 3
    found = TASK.finish({"loss": sums["loss"].detach()}, int(count))
    assert found["loss"] == pytest.approx(mean.item(), rel=1e-14)
    assert found["perplexity"] == pytest.approx(math.exp(mean.item()), rel=1e-14)
    nothing, _ = TASK(logits, torch.full((2, 3), IGNORED))
    assert nothing.item() == 0
    assert TASK.finish({"loss": torch.tensor(1e4)}, 1)["perplexity"] == math.inf


@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 3), (2, 3)])
def test_outputs_that_are_not_one_row_a_token_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{list(shape)} and [2, 3]") + ".*type model=gpt"):
        TASK(torch.zeros(shape), torch.zeros(2, 3, dtype=torch.int64))


@pytest.mark.parametrize("symbols", ["characters", "bytes"])
def test_a_text_becomes_numbers_and_every_token_of_the_tests_is_a_target_once(tmp_path: Path, symbols: str) -> None:
    path = written(tmp_path, "añb\r\n" * 25)
    text = read_text(path, symbols)
    assert text.decode(text.tokens) == "añb\r\n" * 25
    assert torch.equal(text.encode("añb\r\n" * 25), text.tokens)
    first = int(0.9 * len(text.tokens))
    rest = text.tokens[first:]
    tests = held_out_text(path, symbols, 4)
    counted = tests.targets != IGNORED
    assert torch.equal(tests.targets[counted], rest[1:])
    assert torch.equal(tests.samples[counted], rest[:-1])
    train = training_text(path, symbols, 4, samples=None)
    assert len(train) == first - 4  # every window is there, and an epoch draws as many as fit side by side
    assert train.epoch_samples == (first - 1) // 4
    sample, target = train[7]
    assert torch.equal(sample, text.tokens[7:11])
    assert torch.equal(target, text.tokens[8:12])


def test_an_epoch_draws_its_windows_from_seed_and_epoch_alone(tmp_path: Path) -> None:
    dataset = training_text(written(tmp_path), "characters", 8, samples=50)
    drawn = [dataset.epoch_order(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert len(drawn[0]) == 50
    assert int(drawn[0].max()) > 50  # from the whole text


def test_a_text_that_cannot_be_used_is_refused_with_what_to_type(tmp_path: Path) -> None:
    path = written(tmp_path)
    symbols = len(set(WORDS))
    (tmp_path / "short.txt").write_text("abcab")
    for arguments, said in (
        ((str(tmp_path / "none.txt"), "characters", 8, 9), r"none.txt cannot be read .*type dataset.path="),
        ((str(tmp_path / "tinyshakespeare" / "input.txt"), "characters", 8, 9), r"curl --create-dirs -o \S+input.txt"),
        ((path, "characters", 8, symbols + 1), f"type dataset.classes={symbols}"),
        ((path, "bytes", 8, symbols), "type dataset.classes=256"),
        ((path, "characters", 300, symbols), "type dataset.block=25, or dataset.path"),
        ((str(tmp_path / "short.txt"), "characters", 1, 3), "short.txt to train on; type dataset.path=<a longer text>"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_text(*arguments)
    (tmp_path / "picture").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(ConfigError, match="type dataset.symbols=bytes"):
        read_text(str(tmp_path / "picture"), "characters")
    with pytest.raises(ConfigError, match="'ß'.*type another prompt"):
        read_text(path, "characters").encode("ß")


def test_tied_weights_are_refused_in_a_pipeline(tmp_path: Path) -> None:
    piped = composed(*small_gpt(tmp_path), "strategy=pipeline")
    with pytest.raises(ConfigError, match="embedding.tokens.weight|head.linear.weight.*type model.tied=false"):
        instantiate(piped.strategy).validate_model(instantiate(piped.model), 2)
