"""The numbers of one process, in float64: at any world size, with any strategy and gradient sync, of any net.

`seen` of a way is what has been at work in it: an option that is ignored has the numbers of one process, too.
"""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.data.source import Splits, Tensors
from lockstep.data.text import Text
from support.commands import ON_TEST, ema, own_data
from support.configs import composed, with_values
from support.digits import PAIRS_ON_TEST, digits
from support.logged import read_rows
from support.small_text import small_gpt
from support.worlds import distance, in_world, refusal, train, weights

DOUBLE = ["trainer.precision=fp64", "trainer.epochs=2", "logger=[]"]
SHIFT_FLIP = "loader.augment={_target_:lockstep.data.augment.ShiftFlip,pad:1,flip:true}"
# 1437 samples: 24 steps an epoch, of which the last one is shorter.
DIGITS = [ON_TEST, *DOUBLE, "trainer.batch_size=61", "trainer.max_steps=30"]
DRAWING = ["model._target_=support.models.Drawing", "optimizer._target_=support.models.Langevin"]
MLP = [*DIGITS, "model=mlp"]
# 61 test samples by 20: with three ranks one of them evaluates one more batch than the others.
PAIRS = [PAIRS_ON_TEST, *DOUBLE, "dataset=random", "dataset.samples=61", "trainer.batch_size=16"]
PAIRS += ["evaluation.batch_size=20", "optimizer=adamw", "optimizer.fused=false", "trainer.max_grad_norm=0.3"]
PAIRS += [ema(0.8), "monitor=val/loss"]
STAGES = [*PAIRS, "model=mlp", "model.depth=3", "model.width=16"]
SCALED = [*PAIRS, "model=linear", "model._target_=support.models.scaled_layers"]
IMAGES = [ON_TEST, *DOUBLE, "optimizer.fused=false", "sync_bn=on", "trainer.batch_size=200", ema(0.8), SHIFT_FLIP]
IMAGES += ["trainer.gradient_accumulation_steps=2", "trainer.max_grad_norm=1.0"]
TIED = ["model=linear", "model._target_=support.models.TinyGPT", "+model.vocabulary=11", "+model.width=16"]
TIED += ["+model.depth=2", "+model.length=6", *own_data("support.models.tokens"), "dataset.classes=11"]
TIED += [f"+dataset.{half}={{samples:{n},vocabulary:11,length:6}}" for half, n in (("train", 64), ("test", 21))]
TIED += ["trainer.batch_size=16", "optimizer=adamw", "trainer.max_grad_norm=0.5", "loader.validation=16"]
# 14 samples: on 3 ranks the last of two batches has 2 samples, and the last test batch 2.
EMPTY = [*DOUBLE, *own_data(f"{__name__}.few_digits"), "model=linear", "model._target_=support.models.Viewing"]
EMPTY += ["trainer.batch_size=12", "evaluation.batch_size=2", "trainer.channels_last=false", "optimizer.fused=false"]
NORMS = [*DOUBLE, "model=linear", f"model._target_={__name__}.Norms", "optimizer.fused=false"]
FEW_SAMPLES = [*own_data(f"{__name__}.few_digits"), "trainer.batch_size=12", "evaluation.batch_size=2"]
GROWING = [*DOUBLE, "model=linear", "model._target_=support.models.of_any_size", "trainer.batch_size=256"]
GROWING += ["loader.augment={_target_:lockstep.data.augment.ShiftFlip,sizes:[6,8]}"]
NEAR, CONTIGUOUS = [ON_TEST, "trainer.max_steps=3", "logger=[]"], "trainer.channels_last=false"
GPT = ["logger=[csv]", "logging.every=1", "optimizer.fused=false", "trainer.max_steps=6", "trainer.max_grad_norm=0.1"]
GPT += [ema(0.8), "trainer.gradient_accumulation_steps=2"]
MICRO, BUCKETS = "trainer.gradient_accumulation_steps=2", "strategy.bucket_cap_mb=0.001"
FSDP, PIPELINE, TENSORS = "strategy=fsdp", "strategy=pipeline", "strategy=tensor_parallel"
ONE = "ScheduleGPipe 1"  # for the rest of the last batch, of 13 samples


@dataclass
class Case:
    """words: of the training in one process. ways: (ranks, more words) and, where it matters, what is seen there."""

    words: object  # or a function of the folder
    ways: list
    limit: float = 1e-9


CASES = {
    "batch norm": Case([*DIGITS, "sync_bn=on", SHIFT_FLIP], [(2, "")]),
    "accumulation": Case([*DIGITS, "sync_bn=on", "optimizer=adamw", MICRO], [(3, "")]),
    "lazy layers": Case([*DIGITS, "model._target_=support.models.lazy_layers", "sync_bn=on"], [(2, ""), (3, FSDP)]),
    "dropout": Case([*MLP, "model.dropout=0.3"], [(2, MICRO), (3, FSDP)]),
    "drawing": Case([*DIGITS, *DRAWING], [(3, "")]),
    "gradient syncs": Case(
        [*MLP, "trainer.epochs=1", "trainer.max_grad_norm=0.5", "scheduler=one_cycle", ema(0.9)],
        [
            (3, f"{MICRO} {BUCKETS} gradient_sync={name}", seen)
            for name, seen in (
                ("all_reduce", set()),
                ("ring", {"Ring"}),
                ("parameter_server", {"ParameterServer"}),
                ("shared_memory", {"SharedMemorySum"}),
                ("auto", {"SharedMemorySum"}),
            )
        ],
    ),
    "compiled": Case([*MLP, "trainer.max_steps=3"], [(1, "trainer.compile=true", {"compiled"})]),
    "pairs": Case(
        [*PAIRS, "model=mlp"],
        [
            (1, "strategy=data_parallel strategy.first_share=0.5"),
            (2, f"strategy=model_parallel {BUCKETS}", {"moved", "SharedMemorySum"}),
            (3, f"{FSDP} strategy.reshard_after_forward=false"),
            (3, "strategy=virtual_ranks strategy.count=3"),
        ],
    ),
    "layers called with None, with tuples and by keyword": Case(
        [*PAIRS, "model=linear", "model._target_=support.models.Recurrent", "trainer.max_steps=2"],
        [(1, "strategy=model_parallel strategy.devices=3", {"moved"})],
    ),
    "images": Case(IMAGES, [(2, FSDP)]),
    "halves": Case([*DIGITS, "model=toy_parallel"], [(2, f"{PIPELINE} trainer.max_grad_norm=1e3")]),
    "stages": Case(
        STAGES,
        [
            (3, PIPELINE, {"Schedule1F1B 4", "Schedule1F1B 3", ONE}),
            (3, f"{PIPELINE} strategy.schedule=GPipe", {"ScheduleGPipe 4", "ScheduleGPipe 3", ONE}),
            # 1F1B needs three micro-batches here
            (3, f"{PIPELINE} strategy.micro_batches=2", {"ScheduleGPipe 2", ONE}),
            (3, f"{PIPELINE} {MICRO}"),
        ],
    ),
    "a frozen first stage": Case([*SCALED, "parameters.freeze=['0']"], [(2, PIPELINE)]),
    "a frozen last stage": Case([*SCALED, "parameters.freeze=['2']"], [(2, PIPELINE)]),
    "fewer samples than stages": Case([*STAGES, "dataset.samples=7", "trainer.batch_size=2"], [(3, PIPELINE)]),
    "class weights in stages": Case(
        [*MLP, "model.depth=3", "trainer.batch_size=301", "task.class_weights=[1,2,0,4,5,6,0.7,8,9,10]"],
        [(3, PIPELINE), (3, f"{PIPELINE} {MICRO}")],
    ),
    "images that grow": Case(GROWING, [(2, PIPELINE)]),
    "shares without samples": Case(
        [*EMPTY, "+model.norms=0"],
        [(3, ""), (3, "strategy=virtual_ranks strategy.count=6"), (3, "trainer.gradient_accumulation_steps=4")],
    ),
    "batch norms": Case([*NORMS, "trainer.batch_size=61"], [(2, ""), (3, "")]),
    "batch norms without samples": Case([*NORMS, *FEW_SAMPLES], [(3, "")]),
    "batch norm without samples": Case(EMPTY, [(3, ""), (3, f"{FSDP} strategy.wrap_min_parameters=10")]),
    "tied weights": Case(
        [*DOUBLE, *TIED, MICRO, "optimizer.fused=false"],
        [(2, FSDP), (2, f"{FSDP} strategy.wrap_classes=[Block]"), (2, f"{FSDP} strategy.reshard_after_forward=false")],
    ),
    "odd parameters": Case(
        [*DOUBLE, "dataset=random", "model=linear", "model._target_=support.models.OddParameters"],
        [(2, f"{FSDP} strategy.wrap_min_parameters=1 optimizer.fused=false")],
    ),
    "gpt": Case(
        lambda folder: small_gpt(folder, *GPT),
        [(2, "strategy=virtual_ranks"), (2, TENSORS)],
    ),
    "modern gpt": Case(
        lambda folder: small_gpt(folder, *GPT, "model.variant=modern"), [(2, ""), (2, FSDP), (2, TENSORS)]
    ),
    "tokens that do not count": Case(
        lambda folder: small_gpt(folder, f"dataset._target_={__name__}.Uneven", "trainer.max_grad_norm=null"),
        [(1, "trainer.gradient_accumulation_steps=3"), (2, "")],
    ),
    "modern gpt in stages": Case(
        lambda folder: small_gpt(folder, *GPT, "model.tied=false", "model.variant=modern"), [(2, PIPELINE)]
    ),
    "other types": Case(
        [*NEAR, "sync_bn=on"],
        [(2, f"trainer.precision={kind} {more}") for kind in ("bf16", "fp16", "fp32") for more in (FSDP, CONTIGUOUS)],
        limit=0.02,
    ),
    "bf16 in stages": Case([*NEAR, "model=mlp"], [(2, f"{PIPELINE} trainer.precision=bf16")], limit=0.02),
}


class Norms(nn.Module):
    """Each kind of batch norm. What one sees may be rows beside each other, as patches, or behind each other, as views
    that are concatenated."""

    def __init__(self, shape, classes):
        from timm.layers import BatchNormAct2d  # seconds: only where it is used

        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=0.3), BatchNormAct2d(4))
        self.volumes, self.plain = nn.BatchNorm3d(2, affine=False), nn.BatchNorm1d(4, track_running_stats=False)
        self.sequences, self.views = nn.BatchNorm1d(4, eps=0.1), nn.BatchNorm1d(36, momentum=None)
        self.last = nn.Linear(144, classes)

    def forward(self, images):
        found = self.images(images)
        found = self.volumes(found.unflatten(1, (2, 2))).flatten(1, 2).flatten(2)
        found = self.sequences(found) + self.plain(found.mT.flatten(0, 1)).unflatten(0, (len(images), 36)).mT
        views = self.views(torch.cat(found.unbind(1)))
        return self.last(torch.stack(views.chunk(4), 1).flatten(1))


def few_digits(train):
    data = digits(train)
    return Tensors(data.inputs[:14], data.targets[:14])


class Uneven(Text):
    """Blocks of a text of which some have few tokens that count, and some none."""

    def splits(self):
        train, test, _ = super().splits()
        text = train.tokens[: 26 * self.block + 1].long()
        targets = text[1:].clone().view(26, self.block)
        for number, row in enumerate(targets):
            row[number % (self.block + 1) :] = -100
        return Splits(Tensors(text[:-1].view(26, self.block), targets, train.classes), test)


def observed(configs):
    """Trainings in this rank -> the objective of each, and what was at work how often."""
    from lockstep.distributed.shared_memory import SharedMemorySum
    from lockstep.strategies import gradient_sync, one_process
    from lockstep.strategies.pipeline import Pipeline

    found = []
    seen = Counter()

    def note(owner, method, name):
        call = getattr(owner, method)

        def noted(*args):
            result = call(*args)
            seen[name(result, *args)] += 1
            return result

        setattr(owner, method, noted)

    note(gradient_sync.Ring, "add_up", lambda *_: "Ring")
    note(gradient_sync.ParameterServer, "add_up", lambda *_: "ParameterServer")
    note(SharedMemorySum, "__call__", lambda *_: "SharedMemorySum")
    note(one_process, "move", lambda *_: "moved")
    note(Pipeline, "_schedule", lambda schedule, _, count, *more: f"{type(schedule).__name__} {count}" * more[-1])
    for cfg in configs:
        seen.clear()
        objective = train(cfg)
        if cfg.trainer.compile:
            from torch._dynamo.utils import counters

            seen["compiled"] = counters["stats"]["unique_graphs"]
        found.append((objective, +seen))
    return found


def logged(folder):
    """What the CSV logger got, times aside."""
    rows = read_rows(folder) if (folder / "metrics.csv").exists() else []
    return {(step, tag): value for step, tag, value in rows if not tag.startswith("speed/")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{name: (folder, objective, what was seen) of one process and of each way}. A world of each size trains all."""
    parent, jobs, found = tmp_path_factory.mktemp("trained"), [], {name: [] for name in CASES}
    for name, case in CASES.items():
        words = case.words if isinstance(case.words, list) else case.words(parent)
        for ranks, more, *_ in [(1, ""), *case.ways]:
            jobs.append((ranks, name, composed(*words, *more.split(), f"run_dir={parent / str(len(jobs))}")))
    for job in jobs:
        found[job[1]].append(job)
    for size in sorted({ranks for ranks, *_ in jobs}):
        chosen = [job for job in jobs if job[0] == size]
        of_ranks = in_world(size, observed, [cfg for *_, cfg in chosen], limit=1500)
        for job, (first, *others) in zip(chosen, zip(*of_ranks, strict=True), strict=True):
            assert all(objective in (None, first[0]) for objective, _ in others), job
            assert all(seen == first[1] for _, seen in others), job
            found[job[1]][found[job[1]].index(job)] = Path(job[2].run_dir), *first
    return found


@pytest.mark.timeout(1800)  # of the first one, which trains them all; to compile takes minutes without a cache
@pytest.mark.parametrize("name", CASES)
def test_trainings_have_the_numbers_of_one_process(trained, name):
    case, (alone, expected, _), *found = CASES[name], *trained[name]
    for way, (folder, objective, seen) in zip(case.ways, found, strict=True):
        assert distance(weights(alone), weights(folder)) < case.limit, way
        if case.limit < 1e-6:
            assert objective == pytest.approx(expected, rel=1e-9), way
        assert logged(folder) == pytest.approx(logged(alone), rel=1e-9), way
        assert len(way) < 3 or seen.keys() - {""} == way[2], way
        assert "gradient_sync" not in way[1] or not seen or seen.total() > 2 * 24, way  # several buckets in each step


def test_ranks_whose_configs_differ_are_refused_by_the_key(tmp_path):
    said = "trainer.batch_size differs between ranks: 64 on rank 0 and 65 on rank 1"
    answers = in_world(2, train_with_another_batch_size, composed(f"run_dir={tmp_path}"))
    assert all(said in answer for answer in answers)


def train_with_another_batch_size(cfg):
    return refusal(with_values(cfg, f"trainer.batch_size={64 + int(os.environ['RANK'])}"))
