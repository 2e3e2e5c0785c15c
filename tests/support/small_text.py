"""A short text, and a small GPT that trains on it."""

WORDS = "the quick brown fox jumps over the lazy dog, and the dog does not mind. " * 4


def small_gpt(folder, *more):
    (folder / "text.txt").write_text(WORDS)
    data = ["dataset=text", f"dataset.path={folder / 'text.txt'}", f"dataset.classes={len(set(WORDS))}"]
    data += [f"dataset.tokens_dir={folder / 'tokens'}", "dataset.samples=26", "dataset.block=8"]
    model = ["model.width=16", "model.heads=2", "model.layers=2", "optimizer=adamw", "trainer.precision=fp64"]
    model += ["trainer.batch_size=8", "trainer.epochs=2", "trainer.max_grad_norm=0.5", "logger=[]"]
    return [*data, *model, *more]
