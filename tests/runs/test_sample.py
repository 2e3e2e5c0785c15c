"""mode=sample: what a trained language model writes."""

import torch

import lockstep
from support.commands import PYTHON_TRAIN

WORDS = "abcabcabd" * 60
RUN = ["dataset=text", "dataset.path=text.txt", "dataset.classes=4", "dataset.block=8", "dataset.tokens_dir=tokens"]
RUN += ["model.width=16", "model.heads=2", "model.layers=1", "optimizer=adamw", "optimizer.lr=0.01", "logger=[]"]
RUN += ["trainer.batch_size=16", "trainer.epochs=12", "hydra.run.dir=run"]


def test_a_model_of_a_text_goes_on_with_a_prompt_in_the_same_way_for_a_seed(start, tmp_path):
    def typed(*words, code=0):
        return start(*PYTHON_TRAIN, *words).finish(code).output

    def sampled(*more, code=0):
        output = typed("mode=sample", "resume=run", "mode.prompt=abca", "mode.length=20", *more, code=code)
        return next((line for line in output.splitlines() if line.startswith("abca")), output)

    text = tmp_path / "text.txt"
    text.write_text(WORDS)
    typed(*RUN)
    likeliest = sampled("mode.temperature=0")
    assert len(likeliest) == 24
    assert likeliest.startswith("abcab")  # b always follows a
    assert likeliest == sampled("mode.top_k=1", "mode.seed=5")
    assert likeliest == sampled("mode.temperature=1e-39")  # logits divided by it are infinite
    assert likeliest != sampled("mode.temperature=50", "mode.seed=1")
    refused = sampled("mode.prompt=xyz", code=2)
    assert "the text has no 'x'" in refused
    assert "type mode.prompt=<" in refused
    assert "type launch=env" in sampled("launch=fork", code=2)
    text.write_text(WORDS.replace("d", "x"))  # the token numbers stay, and are other characters
    assert "class 3 is d in the training and x in this data" in sampled(code=2)
    text.write_text(WORDS[::-1])
    assert "the test data is not that of the training: it was " in typed("mode=evaluate", "resume=run")
    (tokens,) = lockstep.load(tmp_path / "run").predict(torch.zeros(1, 8, dtype=torch.int64))
    assert len(tokens) == 8
