"""A text and documents as windows of tokens."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from lockstep.data.source import class_count
from lockstep.data.text import Text, Windows
from lockstep.errors import ConfigError

WORDS = "the quick brown añ ☃\r\n fox " * 9


def text(folder: Path, **values: Any) -> Text:
    (folder / "text.txt").write_bytes(WORDS.encode())
    usual = {"path": str(folder / "text.txt"), "test_path": None, "tokenizer": "characters", "separator": None}
    usual |= {"field": "text", "block": 4, "stride": 1, "samples": None, "tokens_dir": str(folder / "tokens")}
    return Text(**usual | values)


def documents(folder: Path, **values: Any) -> Text:
    lines = ({"text": some, "other": number} for number, some in enumerate(["one", None, "", "añ\n☃"]))
    (folder / "train-0.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    with gzip.open(folder / "train-1.jsonl.gz", "wt") as file:
        file.write('{"text": "zipped"}')
    pd.DataFrame({"text": ["in a table", None]}).to_parquet(folder / "train-2.parquet")
    (folder / "train-3.txt").write_text("plain\ntext")
    usual = {"path": f"{folder}/train*", "test_path": [f"{folder}/train-3.txt"], "tokenizer": "bytes"}
    return text(folder, **usual | {"separator": "<|e|>", "stride": 4} | values)


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


@pytest.mark.parametrize(("size", "fold"), [(0.2, None), (5, None), (None, (0, 3)), (None, (1, 3)), (None, (2, 3))])
def test_no_training_window_touches_what_is_held_out(size: float | None, fold: tuple[int, int] | None) -> None:
    train, val = Windows(torch.arange(100).to(torch.uint16), 4, 1, None, "bytes", [], [(0, 100)]).hold_out(
        size, fold, seed=0
    )
    inputs, targets = train.gather(torch.arange(len(train)))
    start, stop = val.pieces[0]
    held_out, used = set(range(start, stop)), {*inputs.flatten().tolist(), *targets.flatten().tolist()}
    assert used == set(range(100)) - held_out
    found = val.gather(torch.arange(len(val)))[1]
    assert found[found != -100].tolist() == sorted(held_out)[1:]


def test_documents_of_all_kinds_are_joined_by_the_separator(tmp_path: Path) -> None:
    source = documents(tmp_path)
    expected = "<|e|>".join(["one", "añ\n☃", "zipped", "in a table", "plain\ntext", ""])
    for _ in range(2):
        source.prepare()
        assert source.splits().train.coder.decode(source.splits().train.tokens.tolist()) == expected
    (tmp_path / "train-3.txt").write_text("another")
    source.prepare()
    assert source.splits().test.coder.decode(source.splits().test.tokens.tolist()) == "another<|e|>"


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


def test_a_tokenizer_of_hugging_face(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    coder = tokenizers.Tokenizer(tokenizers.models.BPE())
    coder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=270, special_tokens=["<|e|>"], initial_alphabet=letters)
    coder.train_from_iterator([WORDS], trainer)
    coder.save(str(tmp_path / "words.json"))
    source = text(tmp_path, tokenizer=str(tmp_path / "words.json"), separator="<|e|>")
    source.prepare()
    train, test, _ = source.splits()
    tokens = [*train.tokens.tolist(), *test.tokens.tolist()]
    assert (train.coder.decode(tokens), train.classes[tokens[-1]]) == (f"{WORDS}<|e|>", "<|e|>")
    assert len(tokens) < len(WORDS)
    assert train.coder.decode(train.coder.encode(["the fox"])[0]) == "the fox"


def test_what_cannot_be_used_is_refused_with_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    (tmp_path / "picture").write_bytes(b"\xff\xd8" * 9)
    shakespeare = str(tmp_path / "tinyshakespeare/input.txt")
    source = text(tmp_path)
    source.prepare()
    with pytest.raises(ConfigError, match="the text has no 'z'.*; type mode.prompt="):
        source.splits().train.coder.encode(["fuzzy"])
    for source, said in [
        (text(tmp_path, path="none.txt"), "No such file.*type dataset.path="),
        (text(tmp_path, path=shakespeare), f"type curl --create-dirs -o {shakespeare} https"),
        (text(tmp_path, block=1000), "type dataset.block=21, or dataset.path="),
        (text(tmp_path, classes=3), "has 21 kinds of tokens; type dataset.classes=null"),
        (documents(tmp_path, path=f"{tmp_path}/bad.jsonl"), "bad.jsonl: KeyError: 'text'.*type dataset.path="),
        (documents(tmp_path, path=f"{tmp_path}/none*"), "no file .*none.*type dataset.path="),
        (
            text(tmp_path, path=str(tmp_path / "picture")),
            "picture: UnicodeDecodeError.*dataset.tokenizer=bytes",
        ),
    ]:
        with pytest.raises(ConfigError, match=said):
            source.prepare()
