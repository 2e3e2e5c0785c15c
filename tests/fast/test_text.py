"""Text as windows of tokens."""

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.data.build import prepare_first
from lockstep.data.source import class_count
from lockstep.data.text import Text, Windows
from lockstep.errors import ConfigError
from support.configs import composed

WORDS = "the quick brown añ ☃\r\n fox " * 9


def text(folder: Path, **values: Any) -> Text:
    (folder / "text.txt").write_bytes(WORDS.encode())
    usual = {"path": str(folder / "text.txt"), "test_path": None, "tokenizer": "characters"}
    usual |= {"block": 4, "stride": 1, "samples": None, "tokens_dir": str(folder / "tokens")}
    return Text(**usual | values)


@pytest.mark.parametrize("tokenizer", ["characters", "bytes"])
def test_a_text_becomes_numbers_and_every_token_of_the_tests_is_a_target_once(tmp_path: Path, tokenizer: str) -> None:
    source = text(tmp_path, tokenizer=tokenizer)
    source.prepare()
    train, test, _ = source.splits()
    written = torch.cat([train.tokens, test.tokens])
    assert train.coder.decode(written.tolist()) == WORDS
    assert len(train.tokens) == int(0.9 * len(written))
    assert (len(train), train.draws) == (len(train.tokens) - 4, (len(train.tokens) - 1) // 4)
    assert class_count(train, train[0][1]) == (len(set(WORDS)) if tokenizer == "characters" else 256)
    whole = train.tokens.long()
    inputs, targets = train.gather(torch.arange(len(train)))
    assert torch.equal(inputs, whole[:-1].unfold(0, 4, 1))
    assert torch.equal(targets, whole[1:].unfold(0, 4, 1))
    targets = test.gather(torch.arange(len(test)))[1]
    assert targets[targets != -100].tolist() == test.tokens[1:].tolist()


def test_no_training_window_touches_what_is_held_out() -> None:
    whole = Windows(torch.arange(100).to(torch.uint16), 4, 1, None, "bytes", [], [(0, 100)])
    for size, fold in ((0.2, None), (5, None), (None, (0, 3)), (None, (1, 3)), (None, (2, 3))):
        train, val = whole.hold_out(size, fold, seed=0)
        inputs, targets = train.gather(torch.arange(len(train)))
        held_out, used = {*range(*val.pieces[0])}, {*inputs.flatten().tolist(), *targets.flatten().tolist()}
        assert used == {*range(100)} - held_out
        found = val.gather(torch.arange(len(val)))[1]
        assert found[found != -100].tolist() == sorted(held_out)[1:]


def test_texts_of_several_files_are_read_one_after_the_other_and_again_when_one_changes(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "train-0.txt.gz", "wt") as file:
        file.write("zipped ")
    (tmp_path / "train-1.txt").write_text("plain\ntext")
    source = text(tmp_path, path=f"{tmp_path}/train*", test_path=[f"{tmp_path}/train-1.txt"], tokenizer="bytes")
    for _ in range(2):
        source.prepare()
        assert source.splits().train.coder.decode(source.splits().train.tokens.tolist()) == "zipped plain\ntext"
    (tmp_path / "train-1.txt").write_text("another")
    source.prepare()
    assert source.splits().test.coder.decode(source.splits().test.tokens.tolist()) == "another"


def test_a_file_of_tokens_is_read_as_it_is(tmp_path: Path) -> None:
    (torch.arange(100) * 3).to(torch.uint16).numpy().tofile(path := tmp_path / "train.bin")
    for classes in (None, 300):
        source = text(tmp_path, path=str(path), tokenizer="uint16", classes=classes)
        source.prepare()
        train, test, _ = source.splits()
        assert (train.tokens.tolist(), test.tokens.tolist()) == ([*range(0, 270, 3)], [*range(270, 300, 3)])
        assert class_count(train, train[0][1]) == (classes or 2**16)
    assert train.coder.decode(train.coder.encode("3 299")) == "3 299"


def test_a_rank_holds_no_text(tmp_path: Path) -> None:
    def own_bytes() -> int:
        return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024

    (tmp_path / "long.txt").write_text(WORDS * 10**5)
    source = text(tmp_path, path=str(tmp_path / "long.txt"))
    source.prepare()
    before = own_bytes()
    train = source.splits().train
    train.gather(torch.arange(0, len(train), 9999))
    assert own_bytes() - before < len(train) / 10


def test_what_cannot_be_used_is_refused_with_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\xff\xd8" * 9)
    source = text(tmp_path)
    source.prepare()
    with pytest.raises(ConfigError, match="the text has no 'z'.*; type mode.prompt="):
        source.splits().train.coder.encode("fuzzy")
    for words, said in [
        ([f"dataset.path={tmp_path}/none.txt"], "FileNotFoundError: .*none.txt.*; type data_dir="),
        ([f"dataset.path={tmp_path}/none*"], "no text is in .*none.*; type data_dir="),
        ([f"dataset.path={tmp_path}/picture"], "UnicodeDecodeError: .*; type data_dir="),
    ]:
        with pytest.raises(ConfigError, match=said):
            prepare_first(composed("dataset=text", f"dataset.tokens_dir={tmp_path}", *words))
