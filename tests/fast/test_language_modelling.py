"""A text as token numbers, the mean over counted tokens, and the GPT's shape."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep.config.nodes import instantiate
from lockstep.data.text import check_text, held_out_text, read_text, training_text
from lockstep.errors import ConfigError
from lockstep.models.gpt import gpt, rotary_angles, turned
from lockstep.tasks.language_modelling import IGNORED, LanguageModelling
from support.configs import composed
from support.refusals import accepted
from support.small_text import GPT2, WORDS, small_gpt, written

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


def test_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="type model.width=16"):
        instantiate(composed(*small_gpt(tmp_path), "model.width=18", "model.heads=4").model)
    piped = composed(*small_gpt(tmp_path), "strategy=pipeline")
    with pytest.raises(ConfigError, match="embedding.tokens.weight|head.linear.weight.*type model.tied=false"):
        instantiate(piped.strategy).validate_model(instantiate(piped.model), 2)
    with pytest.raises(ConfigError, match=r"model.shape=\[64\] should have at least 3 items"):
        accepted("dataset=text", "model=convnet")


def test_a_gpt_sees_no_later_token_and_has_gpt2s_first_loss() -> None:
    torch.manual_seed(0)
    model = gpt([64], 65, layers=4, heads=4, width=128, dropout=0.0, tied=True, **GPT2)
    assert sum(parameter.numel() for parameter in model.parameters()) == 804096  # nanoGPT's
    tokens = torch.randint(65, (2, 64))
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 65
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40], after[:, 40])
    loss = F.cross_entropy(before.flatten(0, 1), tokens.flatten().roll(-1))
    assert loss.item() == pytest.approx(math.log(65), abs=0.1)


OTHERS = {"positions": "rotary", "activation": "relu_squared", "qk_norm": True, "token_shift": True}


@pytest.mark.parametrize("name", [*OTHERS, "zero_init"])
def test_each_option_of_a_gpt_changes_what_it_says_and_none_shows_a_later_token(name: str) -> None:
    def built(options: dict[str, Any]) -> torch.nn.Module:
        torch.manual_seed(0)
        net = gpt([16], 7, layers=1, heads=2, width=8, dropout=0.0, tied=True, **GPT2 | options)
        added = [net.block1.attention.projection.weight, net.block1.mlp.projection.weight]  # type: ignore[union-attr]
        assert all(bool(weight.any()) != ("zero_init" in options) for weight in added)
        for number, (_, weight) in enumerate(sorted(net.named_parameters())):
            torch.nn.init.normal_(weight, std=0.5, generator=torch.Generator().manual_seed(number))
        return net.double()

    net = built({name: OTHERS.get(name, True)})
    assert any(key.startswith("embedding.positions") for key in net.state_dict()) == (name != "positions")
    tokens = torch.randint(7, (2, 16))
    changed = torch.cat([tokens[:, :9], (tokens[:, 9:] + 1) % 7], 1)
    assert torch.equal(net(tokens)[:, :9], net(changed)[:, :9])
    assert not torch.allclose(net(tokens)[:, 9], net(changed)[:, 9])
    if name != "zero_init":
        assert not torch.allclose(net(tokens), built({})(tokens))


def test_rotary_positions_turn_pairs_as_complex_numbers_do_so_that_only_distances_count() -> None:
    vectors, angles = torch.randn(3, 16, 8, dtype=torch.float64), rotary_angles(16, 8).double()
    found = turned(vectors, angles.cos(), angles.sin())
    expected = torch.complex(*vectors.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    assert torch.allclose(found, torch.cat([expected.real, expected.imag], -1))
    query, key = (turned(row.expand(16, 8), angles.cos(), angles.sin()) for row in vectors[0, :2])
    products = query @ key.T  # (place of the query, place of the key)
    assert torch.allclose(products[1:, 1:], products[:-1, :-1], atol=1e-6)
