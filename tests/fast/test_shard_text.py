"""Documents in shards: no token is lost between them, whatever writes the tokens, and each is a target once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.data.dataset import IGNORED
from lockstep.data.partition import generator
from lockstep.data.shard_text import TokenFiles, TokenWindows, index_documents, token_windows
from lockstep.errors import ConfigError

DOCUMENTS = [["the quick brown fox", "jümps over"], [], ["the lazy dog", "", "and "], ["the dog does not mind"]]


def written(folder: Path, kind: str, name: str = "train") -> str:
    """The documents as shards of this kind. Returns their pattern."""
    for number, documents in enumerate(DOCUMENTS):
        path = folder / f"{name}-{number}.{kind}"
        if kind == "txt":
            path.write_text("".join(documents))
        elif kind == "jsonl":
            path.write_text("".join(json.dumps({"id": 3, "body": text}) + "\n" for text in documents))
        else:
            import pyarrow
            import pyarrow.parquet

            table = pyarrow.table({"body": pyarrow.array(documents, pyarrow.string())})
            pyarrow.parquet.write_table(table, path, row_group_size=2)
    return str(folder / f"{name}-*.{kind}")


def opened(urls: Any, folder: Path, tokenizer: str, classes: int = 70000, **options: Any) -> TokenWindows:
    test, index = folder / "test.txt", str(folder / "indexes")
    test.write_text("the")
    halves = [
        TokenFiles(urls, str(test), train, "auto", "body", tokenizer, options.get("separator"), index)
        for train in (True, False)
    ]
    index_documents(*halves, classes, "fail")
    return token_windows(*halves, options.get("block", 8), options.get("window", 100))


def joined(dataset: TokenWindows) -> torch.Tensor:
    """The first input and all targets."""
    inputs, targets = zip(*(dataset[number] for number in range(len(dataset))), strict=True)
    for before, after in zip(targets, inputs[1:], strict=False):
        assert before[-1] == after[0]
    all_targets = torch.cat(targets)
    last = int((all_targets == IGNORED).sum())
    assert last < dataset.block
    assert (all_targets[len(all_targets) - last :] == IGNORED).all()
    return torch.cat([inputs[0][:1], all_targets[: len(all_targets) - last]])


def hugging_face(folder: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=letters)
    tokenizer.train_from_iterator(sum(DOCUMENTS, []), trainer)
    from tokenizers import decoders

    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def tiktoken(folder: Path, *others: bytes) -> str:
    import base64

    words = [*(bytes([number]) for number in range(256)), b"th", b"the", b"do", b"dog", *others]
    lines = [f"{base64.b64encode(word).decode()} {rank}" for rank, word in enumerate(words)]
    (folder / "own.tiktoken").write_text("\n".join(lines))
    return str(folder / "own.tiktoken")


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize("tokenizer", ["characters", "bytes", "hugging_face", "tiktoken"])
def test_every_token_of_every_shard_is_a_target_once(tmp_path: Path, kind: str, tokenizer: str) -> None:
    name = {"hugging_face": hugging_face, "tiktoken": tiktoken}.get(tokenizer, lambda folder: tokenizer)(tmp_path)
    dataset = opened(written(tmp_path, kind), tmp_path, name)
    tokens = joined(dataset)
    text = "".join(sum(DOCUMENTS, []))
    assert dataset.text.decode(tokens) == text
    if kind == "txt" or tokenizer in ("characters", "bytes"):
        assert len(tokens) <= len(text.encode())
    if tokenizer == "bytes":
        assert bytes(tokens.tolist()).decode() == text
    order = dataset.epoch_order(generator(1), None)[: len(dataset)]
    assert sorted(order.tolist()) == list(range(len(dataset)))
    assert torch.equal(dataset.text.encode("the dog"), dataset.text.encode("the dog"))
    assert dataset.text.decode(dataset.text.encode("the dog")) == "the dog"


def test_a_separator_ends_each_document(tmp_path: Path) -> None:
    dataset = opened(written(tmp_path, "jsonl"), tmp_path, hugging_face(tmp_path), separator="<|end|>")
    assert int((joined(dataset) == 0).sum()) == sum(map(len, DOCUMENTS))
    of_bytes = opened(written(tmp_path, "jsonl"), tmp_path, "bytes", separator="\n", block=1000)
    assert of_bytes.text.decode(joined(of_bytes)) == "".join(text + "\n" for text in sum(DOCUMENTS, []))


def test_what_a_tokenizer_file_says_of_batches_of_texts_loses_no_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    name, urls = hugging_face(tmp_path), written(tmp_path, "jsonl")
    plain = joined(opened(urls, tmp_path, name))
    coder = Tokenizer.from_file(name)
    coder.enable_truncation(2)
    coder.enable_padding(length=9, pad_token="<|end|>")
    coder.save(name)
    assert torch.equal(joined(opened(urls, tmp_path, name)), plain)


def test_a_file_of_tiktoken_that_has_changed_is_read_again(tmp_path: Path) -> None:
    urls = written(tmp_path, "txt")
    assert len(joined(opened(urls, tmp_path, tiktoken(tmp_path)))) > len(
        joined(opened(urls, tmp_path, tiktoken(tmp_path, b"qu", b"la", b"laz")))
    )


@pytest.mark.parametrize("end", ["json", "JSONL", "ndjson"])
def test_lines_of_json_are_known_by_the_ends_of_names(tmp_path: Path, end: str) -> None:
    path = Path(written(tmp_path, "jsonl").replace("*", "0")).rename(tmp_path / f"train.{end}")
    dataset = opened(str(path), tmp_path, "bytes")
    assert dataset.text.decode(joined(dataset)) == "".join(DOCUMENTS[0])


def test_a_training_reads_its_own_tokens_while_others_are_written(tmp_path: Path) -> None:
    urls = written(tmp_path, "jsonl")
    expected = joined(opened(urls, tmp_path, "bytes", block=4))
    running, other = (opened(urls, tmp_path, "bytes", block=4) for _ in range(2))
    assert torch.equal(running[0][0], expected[:4])
    (tmp_path / "train-0b.jsonl").write_text(json.dumps({"body": "another"}) + "\n")
    assert len(opened(urls, tmp_path, "bytes", block=4)) > len(running)
    assert torch.equal(joined(running), expected)
    (tmp_path / "train-2.jsonl").write_text(json.dumps({"body": ""}) + "\n")
    opened(urls, tmp_path, "bytes")
    with pytest.raises(OSError, match=r"train-2.jsonl has changed since its tokens were written; type the command ag"):
        joined(other)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    pattern = written(tmp_path, "jsonl")
    with pytest.raises(ConfigError, match="dataset.tokenizer=characters has 28 tokens; type dataset.classes=28"):
        opened(pattern, tmp_path, "characters", classes=19)
    with pytest.raises(ConfigError, match=r"dataset.tokenizer=none.json cannot be read .*type dataset.tokenizer=byte"):
        opened(pattern, tmp_path, "none.json")
    for name in ("broken.json", "broken.tiktoken"):
        (tmp_path / name).write_bytes(b"\x0a\x0e\xff")
        with pytest.raises(ConfigError, match=rf"^dataset.tokenizer=.*{name} cannot be read .*; type dataset.token"):
            opened(pattern, tmp_path, str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"names shards of 2 kinds, .*-3.jsonl \(jsonl\) and .*own.tiktoken \(te"):
        opened([pattern, tiktoken(tmp_path)], tmp_path, "bytes")
    (tmp_path / "train-2.jsonl").write_text('{"body": "x"}\n{"body": "an emoji: \\ud83d"}\n')
    for tokenizer in ("characters", "bytes", hugging_face(tmp_path)):
        with pytest.raises(ConfigError, match=r"train-2.jsonl .* after 1 samples: the next document has half a char"):
            opened(pattern, tmp_path, tokenizer)
    (tmp_path / "train-1.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(ConfigError, match=r"train-1.jsonl is cut .* a document has no text body; type dataset.field="):
        opened(pattern, tmp_path, "bytes")
    (tmp_path / "other.txt").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"other.txt is cut or damaged .* no text in UTF-8 \(byte 2\)"):
        opened(str(tmp_path / "other.txt"), tmp_path, "bytes")


def test_documents_of_shards_that_are_as_they_were_keep_their_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    urls = written(tmp_path, "jsonl")
    opened(urls, tmp_path, "characters")
    (tmp_path / "train-0.jsonl").unlink()
    (tmp_path / "train-3.jsonl").write_text(json.dumps({"body": "Ω"}) + "\n")
    dataset = opened(urls, tmp_path, "characters")
    assert "of 1 of 3 shards once" in caplog.text
    (tmp_path / "other").mkdir()
    anew = opened(urls, tmp_path / "other", "characters")
    assert dataset.text.decode(joined(dataset)) == "the lazy dogand Ω"
    assert torch.equal(joined(dataset), joined(anew))
    assert dataset.fingerprint == anew.fingerprint
