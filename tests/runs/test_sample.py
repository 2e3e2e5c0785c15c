"""mode=sample: what a trained language model writes."""

from pathlib import Path

import torch

import lockstep
from support.commands import PYTHON_TRAIN, Command

WORDS = "abcabcabd" * 60


def test_a_model_of_a_text_goes_on_with_a_prompt_in_the_same_way_for_a_seed(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(WORDS)
    small = [
        "dataset=text",
        f"dataset.path={tmp_path / 'text.txt'}",
        "dataset.classes=4",
        "dataset.block=8",
        "dataset.tokens_dir=tokens",
    ]
    model = ["model.width=16", "model.heads=2", "model.layers=1", "optimizer=adamw", "optimizer.lr=0.01"]
    run = [
        *small,
        *model,
        "trainer.batch_size=16",
        "trainer.epochs=12",
        "logger=[]",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    Command([*PYTHON_TRAIN, *run], tmp_path).finish()
    sample = [*PYTHON_TRAIN, "mode=sample", f"resume={tmp_path / 'run'}", "mode.prompt=abca", "mode.length=20"]

    def said(*more: str) -> str:
        output = Command([*sample, *more], tmp_path).finish().output
        (line,) = [line for line in output.splitlines() if line.startswith("abca")]
        return line

    likeliest = said("mode.temperature=0")
    assert len(likeliest) == 24
    assert likeliest.startswith("abcab")  # b always follows a
    assert likeliest == said("mode.top_k=1", "mode.seed=5")
    assert likeliest == said("mode.temperature=1e-39")  # logits divided by it are infinite
    assert likeliest != said("mode.temperature=50", "mode.seed=1")
    refused = Command([*sample, "mode.prompt=xyz"], tmp_path).finish(code=2)
    assert "the text has no 'x'" in refused.output
    assert "type mode.prompt=<" in refused.output
    assert "type launch=env" in Command([*sample, "launch=fork"], tmp_path).finish(code=2).sentence
    (tmp_path / "text.txt").write_text(WORDS.replace("d", "x"))  # the token numbers stay, and are other characters
    refused = Command(sample, tmp_path).finish(code=2)
    assert "class 3 is d in the training and x in this data" in refused.output
    (tmp_path / "text.txt").write_text(WORDS[::-1])
    changed = Command([*PYTHON_TRAIN, "mode=evaluate", f"resume={tmp_path / 'run'}"], tmp_path).finish().output
    assert "the test data is not that of the training: it was " in changed
    (tokens,) = lockstep.load(tmp_path / "run").predict(torch.zeros(1, 8, dtype=torch.int64))
    assert len(tokens) == 8
