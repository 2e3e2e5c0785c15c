"""A short text, and a small GPT that trains on it."""

from pathlib import Path

WORDS = "the quick brown fox jumps over the lazy dog, and the dog does not mind. " * 4


def written(folder: Path, text: str = WORDS) -> str:
    path = folder / "text.txt"
    path.write_text(text)
    return str(path)


def small_gpt(folder: Path, *more: str) -> list[str]:
    """A text of 288 characters, 28 symbols, in blocks of 8, and a GPT with two blocks."""
    return [
        "dataset=text",
        f"dataset.path={written(folder)}",
        f"dataset.classes={len(set(WORDS))}",
        "dataset.block=8",
        "dataset.samples=26",
        "model.width=16",
        "model.heads=2",
        "model.layers=2",
        "optimizer=adamw",
        "trainer.precision=fp64",
        "trainer.batch_size=8",
        "trainer.epochs=2",
        "trainer.max_grad_norm=0.5",
        "logger=[]",
        *more,
    ]
