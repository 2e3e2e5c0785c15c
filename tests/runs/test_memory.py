"""Where memory is short: blocks that compute again, and smaller micro-batches."""

import pytest
import torch
from hydra.utils import instantiate

from lockstep.training.setup import checkpoint_activations
from support.commands import ROOT
from support.configs import composed
from support.worlds import distance, in_world, train_all, weights

DOUBLE = ["trainer.precision=fp64", "logger=[]", "trainer.epochs=1"]
DRAWING = ["model._target_=support.memory.Drawing", "~model.shape", "~model.classes"]


@pytest.mark.parametrize(
    ("words", "blocks"), [(["model=convnet", "trainer.max_steps=8"], "layer*"), (DRAWING, "first")]
)
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, ["trainer.gradient_accumulation_steps=2"]),
        (2, ["strategy=fsdp"]),
        (3, ["trainer.batch_size=4", "trainer.max_steps=8"]),
        (3, ["sync_bn=off"]),
        (1, ["strategy=virtual_ranks", "strategy.count=2"]),
    ],
)
def test_blocks_that_compute_again_give_the_same_numbers(words, blocks, ranks, more, tmp_path):
    jobs = {"plain": [], "again": [f"trainer.checkpoint_activations=[{blocks}]"]}
    for name in jobs:
        (tmp_path / name).mkdir()
    of = [composed(*DOUBLE, *words, *more, *own, f"run_dir={tmp_path / name}") for name, own in jobs.items()]
    in_world(ranks, train_all, of)
    assert distance(weights(tmp_path / "plain"), weights(tmp_path / "again")) < 1e-12


def kept_bytes(model, inputs):
    kept = []

    def keep(tensor):
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs)
    return sum(kept)


def test_blocks_that_compute_again_keep_less():
    node = composed("model=gpt", "model.shape=[32]", "model.classes=50", "dataset=random").model
    inputs = torch.zeros(4, 32, dtype=torch.int64)
    model = instantiate(node)
    before, names = kept_bytes(model, inputs), [name for name, _ in model.named_parameters()]
    checkpoint_activations(model, ["block*"])
    assert kept_bytes(model, inputs) < 0.5 * before
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_without_memory_is_told_what_to_type(ranks, train):
    """The batch of 48 samples needs 768 MB, and all ranks together may take 600."""
    launch = [] if ranks == 1 else ["launch=fork", f"launch.nproc_per_node={ranks}"]
    own = ["model._target_=support.memory.Wide", "~model.shape", "~model.classes", f"+model.megabytes={600 // ranks}"]
    words = [*own, "trainer.batch_size=48", "trainer.max_steps=3", "evaluation.batch_size=4", *launch]
    failed = train(*words, "hydra.run.dir=run", code=1, PYTHONPATH=ROOT / "tests").output
    assert "this rank has no memory left" in failed
    assert "type trainer.gradient_accumulation_steps=<more>" in failed
