"""Memory is no cliff: blocks that compute again, and steps that run out of memory and are done again."""

import random
import re

import pytest
import torch
from hydra.utils import instantiate

from lockstep.training.checkpointing import checkpoint_activations
from support.commands import ROOT
from support.configs import composed
from support.worlds import distance, in_world, train_all, weights

DOUBLE = ["trainer.precision=fp64", "logger=[]", "trainer.epochs=1"]
DRAWING = ["model._target_=support.memory.Drawing", "~model.shape", "~model.classes", "trainer.buffers=own"]
RUNS_OUT = ["model._target_=support.memory.RunsOut", "~model.shape", "~model.classes", "trainer.buffers=own"]
AUTO = "trainer.gradient_accumulation_steps=auto"


def trained(folder, ranks, *jobs):
    """The weights and buffers that trainings with these words end with, one after the other in one world."""
    folders = [folder / str(number) for number in range(len(jobs))]
    for made in folders:
        made.mkdir()
    configs = [composed(*DOUBLE, *words, f"run_dir={made}") for words, made in zip(jobs, folders, strict=True)]
    in_world(ranks, train_all, configs)
    return [weights(made) for made in folders]


@pytest.mark.parametrize(
    ("words", "blocks"),
    [
        (["model=convnet", "trainer.max_steps=8"], "layer*"),
        (DRAWING, "first"),
    ],
)
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, []),
        (2, []),
        (2, ["strategy=fsdp"]),
        (2, ["trainer.gradient_accumulation_steps=2"]),
        (3, ["trainer.batch_size=4", "trainer.max_steps=8"]),
        (3, ["sync_bn=off"]),
        (1, ["strategy=virtual_ranks", "strategy.count=2"]),
    ],
)
def test_blocks_that_compute_again_give_the_same_numbers(words, blocks, ranks, more, tmp_path):
    used = [*words, *more]
    plain, again = trained(tmp_path, ranks, used, [*used, f"trainer.checkpoint_activations=[{blocks}]"])
    assert distance(plain, again) < 1e-12


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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_that_runs_out_of_memory_is_done_again_in_smaller_parts(ranks, tmp_path):
    """On any rank, in any step, in a forward or a backward pass, once or several times."""
    draw, words = random.Random(ranks), [*RUNS_OUT, "trainer.batch_size=64"]  # 23 steps
    jobs = [
        [*words, "+model.fails=[]"],
        *([*words, AUTO, f"+model.fails={drawn_fails(draw, ranks)}"] for _ in range(6)),
    ]
    trained(tmp_path, ranks, *jobs)
    undisturbed, *others = [torch.load(tmp_path / str(number) / "model.pt") for number in range(len(jobs))]
    for other, job in zip(others, jobs[1:], strict=True):
        for name, value in undisturbed.items():
            if name != "samples" or ranks == 1:  # a rank's share of a smaller part is rounded in another way
                assert distance(value.double(), other[name].double()) < 1e-9, (name, job[-1])


def drawn_fails(draw, ranks):
    fails = [(draw.randrange(ranks), draw.randint(1, 23), draw.random() < 0.5) for _ in range(draw.randint(1, 3))]
    return "[" + ",".join(f"[{rank},{number},{str(backward).lower()}]" for rank, number, backward in fails) + "]"


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_that_is_really_too_small(ranks, train, tmp_path):
    """The batch of 48 samples needs 768 MB, and all ranks together may take 600: half of the batch fits."""
    may_take = f"+model.megabytes={600 // ranks}"
    launch = [] if ranks == 1 else ["launch=fork", f"launch.nproc_per_node={ranks}"]
    own = ["model._target_=support.memory.Wide", "~model.shape", "~model.classes"]
    words = [*own, "trainer.batch_size=48", "trainer.max_steps=3", "evaluation.batch_size=4", *launch]
    path = {"PYTHONPATH": ROOT / "tests"}
    output = train(*words, may_take, AUTO, "hydra.run.dir=short", **path).output
    found = re.findall(r"rank (\d) ran out of memory in step 1, which is done again: .* (\d) micro-batches", output)
    assert found[0][1] == "2"
    plain = train(*words, "+model.megabytes=100000", "hydra.run.dir=enough", **path).output
    assert "ran out" not in plain
    assert distance(weights(tmp_path / "enough"), weights(tmp_path / "short")) < 1e-5
    failed = train(*words, may_take, "hydra.run.dir=without", code=1, **path).output
    assert "type trainer.gradient_accumulation_steps=auto" in failed
    smallest = train(*words, "+model.megabytes=24", AUTO, "hydra.run.dir=smallest", code=1, **path).output
    assert "this rank has no memory left" in smallest
