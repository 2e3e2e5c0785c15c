"""Nets x data x ranks x options x what comes after: each gives the numbers of plain torch, or one sentence.

A combination is one value of each axis. `pairwise` chooses combinations so that any two values of two axes meet in one;
`drawn` draws as many as are asked for. The right numbers are those of `oracle`, which is plain torch in one process.
Where a net or its data draws, they are those of the run on one rank without the options that change nothing.
"""

import itertools
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lockstep
from support.commands import ROOT, ema
from support.small_commands import Answer, answer_of
from zoo import data
from zoo.data import KINDS, TRUTHS
from zoo.modules import BODIES
from zoo.oracle import BATCH, EPOCHS, LR, Numbers, first_model, new_net, trained

FORK = ["launch=fork", "backend=gloo"]
COMMON = [
    "--config-dir", str(ROOT / "tests" / "zoo" / "conf"), "model=linear",
    "model._target_=zoo.modules.net", f"trainer.batch_size={BATCH}",
    f"trainer.epochs={EPOCHS}", f"optimizer.lr={LR}", "scheduler=constant",
    "monitor=val/loss", "logger=[]", "snapshot.keep_last=100", "watch.timeout=60",
    "watch.weights_every=1",
]  # fmt: skip


@dataclass(frozen=True)
class Way:
    """Ranks, and how they share the work.

    resumed_on: ranks of a run that goes on from a snapshot of this one.
    micro_batches: that a pipeline cuts a batch into, one after the other.
    """

    ranks: int
    resumed_on: int
    words: tuple[str, ...] = ()
    micro_batches: int = 1


WAYS = {
    "one": Way(1, 2),
    "two": Way(2, 3),
    "three": Way(3, 1),
    "two, ring": Way(2, 3, ("gradient_sync=ring",)),
    "three, parameter_server": Way(3, 2, ("gradient_sync=parameter_server",)),
    "two, all_reduce": Way(2, 3, ("gradient_sync=all_reduce",)),
    "two, unused": Way(2, 3, ("strategy.find_unused_parameters=true",)),
    "fsdp, two": Way(2, 3, ("strategy=fsdp", "strategy.wrap_min_parameters=1")),
    "fsdp, three": Way(3, 2, ("strategy=fsdp", "strategy.reshard_after_forward=false")),
    "fsdp, two by two": Way(4, 4, ("strategy=fsdp", "strategy.replicate=2")),
    "pipeline": Way(2, 2, ("strategy=pipeline", "strategy.micro_batches=2"), 2),
    "virtual_ranks": Way(2, 1, ("strategy=virtual_ranks", "strategy.count=2")),
    "virtual_ranks, one": Way(1, 2, ("strategy=virtual_ranks", "strategy.count=2")),
    "model_parallel": Way(2, 1, ("strategy=model_parallel", "strategy.devices=2")),
    "tensor_parallel": Way(2, 1, ("strategy=tensor_parallel",)),
    "tensor_parallel, two by two": Way(4, 4, ("strategy=tensor_parallel", "strategy.replicate=2")),
}
FSDP = ("fsdp, two", "fsdp, three", "fsdp, two by two")
VIRTUAL = ("virtual_ranks", "virtual_ranks, one")
TENSOR_PARALLEL = ("tensor_parallel", "tensor_parallel, two by two")
SHARDED = (*FSDP, *TENSOR_PARALLEL, "pipeline")
# How tensor_parallel cuts a body, beside its stem and its head.
PLANS = dict.fromkeys(("in_place", "one_prelu", "frozen"), "{body.0:colwise},{body.2:rowwise}")
PLANS |= dict.fromkeys(("encoder", "dropped_encoder"), "{body.linear1:colwise},{body.linear2:rowwise}")
PLANS |= dict.fromkeys(("lazy_linear", "lazy_batch_norm", "twice_the_same"), "{body.0:gathered}")
PLANS |= dict.fromkeys(("spectral_norm", "old_spectral_norm", "weight_norm", "orthogonal"), "{body:gathered}")
PLANS |= dict.fromkeys(("Embedded", "EmbeddedSparse"), "{body.table:gathered}")
PLANS |= {
    "linear": "{body:colwise},{head.layer:rowwise}",
    "dropout": "{body.1:gathered}",
    "Reentrant": "{body.layers.0:colwise},{body.layers.2:rowwise}",
    "Checkpointed": "{body.layers.0:colwise},{body.layers.3:rowwise}",
    "Tied": "{body.down:colwise},{body.up:rowwise}",
    "Unused": "{body.unused:gathered}",
    "Experts": "{body.experts.*:gathered}",
    "EmbeddedPadded": "{body.table:rowwise}",
    "OwnFunction": "{body.layer:gathered}",
}


class Change(NamedTuple):
    """An option that changes the numbers, and what it does."""

    words: tuple[str, ...]
    numbers: Numbers
    tolerance: float = 1e-9


OWN_OPTIMIZERS = ("Lookahead", "Counting", "OddState")
CHANGES = {
    "none": Change((), Numbers()),
    "accumulation": Change(("trainer.gradient_accumulation_steps=2",), Numbers(accumulation=2)),
    "clipping": Change(("trainer.max_grad_norm=0.05",), Numbers(clip=0.05)),
    "ema": Change((ema(0.8),), Numbers(ema=0.8)),
    # Adam divides by the size of a gradient, also where that is rounding alone: a bias before a batch norm.
    "adamw": Change(("optimizer=adamw", f"optimizer.lr={LR}", "optimizer.weight_decay=0.1"), Numbers(adamw=True), 1e-6),
    **{
        name: Change(
            ("optimizer=sgd", f"optimizer._target_=zoo.optimizers.{name}", f"optimizer.lr={LR}"), Numbers(own=name)
        )
        for name in OWN_OPTIMIZERS
    },
    "frozen stem": Change(("parameters.freeze=[stem]",), Numbers(frozen="stem.")),
    "slow head": Change((f"parameters.groups=[{{match:head.*,lr:{LR / 10}}}]",), Numbers(slow="head.")),
    "cosine": Change(("scheduler=cosine", "scheduler.warmup_epochs=0"), Numbers(cosine=True)),
    "one_cycle": Change(("scheduler=one_cycle", "optimizer.momentum=0"), Numbers(one_cycle=True)),
    "whole batch": Change(("trainer.batch_size=22",), Numbers(batch=22)),
    "stopped": Change(("trainer.max_steps=4",), Numbers(steps=4)),
    "fp32": Change(("trainer.precision=fp32",), Numbers(), 1e-3),
    "all": Change(
        (
            "trainer.gradient_accumulation_steps=2",
            "trainer.max_grad_norm=0.05",
            ema(0.8),
            "parameters.freeze=[stem]",
        ),
        Numbers(accumulation=2, clip=0.05, ema=0.8, frozen="stem."),
    ),
}
# Options that change no number.
EQUAL = {
    "none": (),
    "workers": ("loader.num_workers=1",),
    "watched": ("watch.weights_every=2",),
    "saved": ("snapshot.every=1steps",),
    "contiguous": ("trainer.channels_last=false",),
    "deterministic": ("trainer.deterministic=true",),
    "curves": ("logger=[tensorboard,csv]", "logging.every=1"),
    "profiled": ("trainer.profiler={_target_: lockstep.training.profile.Profiler, after: 1, steps: 2}",),
    "small evaluations": ("evaluation.batch_size=2",),
    "unfused": ("optimizer.fused=false",),
    "checkpointed": ("trainer.checkpoint_activations=[body]",),
}
AFTER = ("nothing", "resume", "evaluate", "export", "load")
# Nets that draw in a forward pass, and those whose state a forward pass changes.
DRAWS = ("dropout", "dropped_channels", "dropped_lstm", "dropped_attention", "dropped_encoder", "Noise")
DRAWS += ("Checkpointed", "Residual", "Mixed", "NoisyWeights", "Coin", "AlwaysNoise")
CHANGED = ("RunningScale", "Codebook", "Teacher", "CountingBuffer", "AlwaysCounting", "ExtraState", "spectral_norm")
CHANGED += ("old_spectral_norm", "running_instance_norm", "batch_norm_1d", "batch_norm_2d", "batch_norm_cumulative")
CHANGED += ("batch_norm_plain", "two_batch_norms", "lazy_batch_norm", "Residual")
# Values of two axes that no command has together: one of them is refused there, which other tests hold.
OWN_BUFFERS = ("RunningScale", "Codebook", "running_instance_norm")
NEVER = [
    # Each rank has buffers of its own there, as docs/promise.md says; mode=check names them.
    ({*OWN_BUFFERS}, {way for way in WAYS if WAYS[way].ranks > 1} | {"resume"}),
    # What an evaluation draws is a rank's.
    ({"AlwaysNoise"}, {way for way in WAYS if WAYS[way].ranks > 1} | {"resume"}),
    # A later part of a step that leaves weights out is a hang, whose cause is told.
    ({"Experts", "LateExperts"}, {"accumulation", "all"}),
    # gloo itself may end ranks that add up gradients of other weights.
    ({"Experts", "LateExperts"}, {*FSDP, "tensor_parallel, two by two"}),
    # fsdp forgets what a forward pass changes in gathered weights; mode=check finds other numbers on two ranks.
    ({"Teacher"}, {*FSDP, "tensor_parallel, two by two"}),
    ({"scaled_batches"}, {"small evaluations"}),  # its collate_fn draws for a batch, in evaluations, too
    ({"accumulation", "all"}, set(VIRTUAL)),
    ({"accumulation", "all"}, {"tensor_parallel, two by two"}),  # a batch norm gets single samples there
    ({*OWN_OPTIMIZERS}, {way for way in WAYS if way not in ("one", "two", "three")} | {"unfused", *CHANGED}),
]
# {what a refusal says: the two values, of two axes, that it is of; an empty set is any value}
REFUSALS: dict[str, tuple[set[str], set[str]]] = {
    "max_norm=": (
        {"EmbeddedMaxNorm"},
        {way for way in WAYS if WAYS[way].ranks > 1} | {"resume", "evaluate"},
    ),
    "find_unused_parameters=true": (
        {"Unused", "Experts", "LateExperts", "Reentrant"},
        {way for way in WAYS if WAYS[way].ranks > 1 and "unused" not in way} | {"resume", *VIRTUAL},
    ),
    "adds up gradients of one real type": ({"Complex", "OddParameters"}, set(VIRTUAL)),
    "its weights are in model.pt": (set(), {"export"}),
    "use_reentrant=False": ({"Reentrant"}, {"two, unused"}),
    "finds shapes without values": ({"Experts", "LateExperts"}, {"pipeline"}),
    "make no batch of inputs and targets": ({"numpy_flipped"}, set()),
    "add up dense gradients": ({"EmbeddedSparse"}, {way for way in WAYS if WAYS[way].ranks > 1} | {"resume"}),
    "type optimizer=sgd, or make the embedding": ({"EmbeddedSparse"}, {"adamw"}),
    "has a hook for its gradient": ({"OwnFunction"}, {*FSDP, *TENSOR_PARALLEL}),
    "passes one tensor from rank to rank": ({"dicts", "dicts_of_two", "nested"}, {"pipeline"}),
    "the forward pass changes the weights": ({"Teacher", "EmbeddedMaxNorm"}, {*VIRTUAL}),
    "keeps beside its tensors": ({"ExtraState"}, set(VIRTUAL)),
    "batch norm has one value": ({name for name in CHANGED if "norm" in name} | {"Residual"}, {"pipeline"}),
    "changes a value in place": ({"Teacher"}, {"pipeline"}),
    "would change it twice": ({"Teacher"}, {"checkpointed"}),
    "cannot compute body again": ({"scripted"}, {"checkpointed"}),
    "cannot cut the model, or the optimizer": ({"amounts"}, {*TENSOR_PARALLEL}),  # one output for two ranks
    "cannot cut the model": (
        {"Complex", "OddParameters", "scripted", "spectral_norm", "old_spectral_norm", "weight_norm", "orthogonal"},
        {*SHARDED, "model_parallel"},
    ),
    "weight is also one of another layer": ({"Tied", "twice_the_same"}, set(TENSOR_PARALLEL)),
    "and the classes are 0 to 3": ({"stray_classes", "binary_masks"}, set()),
    "and its labels are 0 or 1": ({"stray_labels"}, set()),
    "class 0 is a in the training data and d in the test data": ({"names_in_another_order"}, set()),
}
AXES: dict[str, Sequence[str]] = {
    "body": tuple(BODIES),
    "kind": tuple(kind for kind in KINDS if kind not in data.REFUSED),
    "way": tuple(WAYS),
    "change": tuple(CHANGES),
    "equal": tuple(EQUAL),
    "after": AFTER,
}


class Combination(NamedTuple):
    body: str
    kind: str
    way: str = "one"
    change: str = "none"
    equal: str = "none"
    after: str = "nothing"

    def __str__(self) -> str:
        return " | ".join(self)

    @property
    def words(self) -> list[str]:
        return self.words_on(WAYS[self.way].ranks)

    def words_on(self, ranks: int) -> list[str]:
        """The command on another number of ranks."""
        truth, way = TRUTHS[self.kind](True), WAYS[self.way]
        words = [*COMMON, f"+model.body={self.body}", *data.words_of(self.kind), f"task={truth.task}", *truth.words]
        if self.way in TENSOR_PARALLEL:
            words.append(plan(self.body))
        words += ["trainer.precision=fp64", *way.words, *CHANGES[self.change].words, *EQUAL[self.equal]]
        if ranks > 1:
            words += [*FORK, f"launch.nproc_per_node={ranks}"]
        last = {word.partition("=")[0]: word for word in words if "=" in word}
        return ["--config-dir", words[1], *last.values()]


def plan(body: str) -> str:
    """What tensor_parallel cuts: linear layers, so no stem of images."""
    stem = "" if BODIES[body][0] == "map" else "{stem.layer:gathered},"
    return f"strategy.parallelize_plan=[{stem}{{head.layer:gathered}},{PLANS.get(body, '')}]".replace(",]", "]")


ONCE = [Combination("linear", kind, "two") for kind in data.REFUSED]


def pairwise(seed: int = 0) -> list[Combination]:
    """Few combinations in which any two values of two axes meet: the next one has the most pairs that are missing."""
    draws = random.Random(seed)
    missing = {
        ((one, first), (other, second))
        for (one, firsts), (other, seconds) in itertools.combinations(AXES.items(), 2)
        for first, second in itertools.product(firsts, seconds)
        if not _is_never(first, second)
    }
    found = []
    while missing:
        start = min(missing) if len(missing) < 50 else draws.choice(sorted(missing))
        chosen = dict(start)
        for axis in draws.sample(list(AXES), len(AXES)):
            if axis not in chosen:
                gains = {
                    value: sum(_pair(axis, value, *other) in missing for other in chosen.items())
                    for value in draws.sample(AXES[axis], len(AXES[axis]))
                }
                for value in list(gains):
                    if any(_is_never(value, other) for other in chosen.values()):
                        del gains[value]
                chosen[axis] = max(gains, key=gains.__getitem__)
        missing -= {_pair(*one, *other) for one, other in itertools.combinations(chosen.items(), 2)}
        found.append(Combination(**chosen))
    return found


def _is_never(one: str, other: str) -> bool:
    return any((one in some and other in others) or (other in some and one in others) for some, others in NEVER)


def _pair(one: str, first: str, other: str, second: str) -> tuple[tuple[str, str], tuple[str, str]]:
    order = list(AXES)
    pairs = ((one, first), (other, second))
    return pairs if order.index(one) < order.index(other) else pairs[::-1]


def drawn(count: int, seed: int) -> list[Combination]:
    """So many combinations, drawn by `seed`."""
    draws, found = random.Random(seed), list[Combination]()
    while len(found) < count:
        made = Combination(*(draws.choice(values) for values in AXES.values()))
        if not any(_is_never(*pair) for pair in itertools.combinations(made, 2)):
            found.append(made)
    return found


@dataclass(frozen=True)
class Outcome:
    """result: equal, ran (where no right number is known), refused, or wrong. why: the sentence, or what is wrong."""

    combination: Combination
    result: str
    why: str = ""


class Zoo:
    """Runs combinations in a folder. Runs on one rank that several of them are compared with are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock, self.locks = folder, Lock(), dict[Combination, Lock]()
        self.numbers = itertools.count()

    def outcomes(self, chosen: Sequence[Combination], at_once: int) -> Iterator[Outcome]:
        with ThreadPoolExecutor(at_once) as threads:
            yield from threads.map(self.outcome, chosen)

    def outcome(self, combination: Combination) -> Outcome:
        place = self._place()
        try:
            return self._judged(combination, place)
        except Exception as error:  # of a comparison: a file is missing, a key, a shape
            return Outcome(combination, "wrong", f"{type(error).__name__}: {error}")
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _judged(self, combination: Combination, place: Path) -> Outcome:
        answer = answer_of([*combination.words, "run_dir=run"], place)
        if answer.code:
            return refused_or_wrong(combination, answer)
        right = self.right(combination)
        found = torch.load(place / "run" / "model.pt", weights_only=True)
        if right is None:
            floats = {n: v for n, v in found.items() if isinstance(v, Tensor) and v.is_floating_point()}
            bad = [name for name, value in floats.items() if not value.isfinite().all()]
            return Outcome(combination, "wrong" if bad else "ran", f"not finite: {bad}")
        tolerance = CHANGES[combination.change].tolerance
        wrong = difference(found, right[0], tolerance)
        last = json.loads((place / "run" / "run.json").read_text())["objective"]["last"]
        if not wrong and not math.isclose(last, right[1], rel_tol=tolerance, abs_tol=tolerance):
            wrong = f"test loss {last}, not {right[1]}"
        after = None if wrong else AFTERWARDS[combination.after](combination, place, found, right[1])
        if isinstance(after, Outcome):
            return after
        return Outcome(combination, "wrong", wrong) if wrong else Outcome(combination, "equal")

    def right(self, combination: Combination) -> tuple[dict[str, Tensor], float] | None:
        """The state dict and the test loss that the combination must have. None: nobody knows them."""
        body, kind, way, change, _, _ = combination
        if _is_known(combination):
            return trained(kind, _numbers(combination), first_model(body, kind))
        if body in CHANGED and way in VIRTUAL:  # each virtual rank begins with the state before the step
            return self._plain_run(Combination(body, kind, "virtual_ranks, one", change))
        if way in ("pipeline", *TENSOR_PARALLEL) and body in (*DRAWS, *CHANGED):
            return None  # a stage draws by itself, and a rank for its part of the model
        if body == "EmbeddedSparse" and change == "adamw":  # torch refuses it; virtual ranks have dense gradients
            return None
        return self._plain_run(Combination(body, kind, change=change))

    def _plain_run(self, combination: Combination) -> tuple[dict[str, Tensor], float] | None:
        with self.lock:
            lock = self.locks.setdefault(combination, Lock())
        place = self.folder / "plain" / "-".join(part.replace(" ", "_") for part in combination)
        with lock:
            if not place.exists():
                place.mkdir(parents=True)
                answer_of([*combination.words, "run_dir=run"], place)
        if not (place / "run" / "model.pt").exists():
            return None
        last = json.loads((place / "run" / "run.json").read_text())["objective"]["last"]
        return torch.load(place / "run" / "model.pt", weights_only=True), last

    def _place(self) -> Path:
        with self.lock:
            place = self.folder / str(next(self.numbers))
        place.mkdir(parents=True)
        return place


def _is_known(combination: Combination) -> bool:
    """Whether plain torch computes its numbers."""
    body, kind, way, change, _, _ = combination
    is_drawn = TRUTHS[kind](True).draws or body in DRAWS or (body == "lazy_linear" and change == "fp32")
    has_own_state = body in CHANGED and way in (*VIRTUAL, "tensor_parallel, two by two")
    return not is_drawn and not has_own_state and not (body == "EmbeddedSparse" and change == "adamw")


def _numbers(combination: Combination) -> Numbers:
    numbers = CHANGES[combination.change].numbers
    return replace(numbers, accumulation=numbers.accumulation * WAYS[combination.way].micro_batches)


def difference(found: dict[str, Any], right: dict[str, Any], tolerance: float) -> str:
    """What is wrong with a state dict; empty if nothing is."""
    tensors = {name: value for name, value in right.items() if isinstance(value, Tensor)}
    names = {name for name, value in found.items() if isinstance(value, Tensor)}
    if names != tensors.keys():
        return f"names: {sorted(names ^ tensors.keys())}"
    for name, value in tensors.items():
        other = found[name]
        if other.shape != value.shape:
            return f"{name}: {list(other.shape)}, not {list(value.shape)}"
        if value.numel() == 0:
            continue
        if tolerance <= 1e-6 and other.dtype != value.dtype:
            return f"{name}: {other.dtype}, not {value.dtype}"
        if not value.is_floating_point() and not value.is_complex():
            if not torch.equal(value, other):
                return f"{name}: {other.flatten()[:4].tolist()}, not {value.flatten()[:4].tolist()}"
            continue
        wide = torch.complex128 if value.is_complex() else torch.float64
        apart = (other.to(wide) - value.to(wide)).abs().max() / value.to(wide).abs().max().clamp(min=1)
        if not apart <= tolerance:
            return f"{name}: {float(apart):.1e} from the right value"
    return ""


SAYING = ("lockstep: ", "what it means: ", "what to do: ", "it ended: ")  # how the lines begin that say what to type


def refused_or_wrong(combination: Combination, answer: Answer) -> Outcome:
    """Of a command that did not end well."""
    for phrase, (some, others) in REFUSALS.items():
        told = [line for line in answer.output.splitlines() if phrase in line and line.strip().startswith(SAYING)]
        if told and (not some or some & set(combination)) and (not others or others & set(combination)):
            return Outcome(combination, "refused", told[0])
    return Outcome(combination, "wrong", str(answer))


def _follow(combination: Combination, place: Path, *words: str) -> Answer:
    """A later command takes what the run was trained with from its folder."""
    return answer_of(["--config-dir", combination.words[1], *words], place)


def nothing(combination: Combination, place: Path, found: dict[str, Any], loss: float) -> Outcome | None:
    return None


def resume(combination: Combination, place: Path, found: dict[str, Any], loss: float) -> Outcome | None:
    """From the snapshot of a step in mid-epoch, on another number of ranks, to the same end."""
    step = 1 if combination.change == "whole batch" else 2
    first = [*combination.words, "run_dir=first", "snapshot.every=1steps"]
    answer = answer_of(first, place)
    if answer.problem() or answer.code:
        return Outcome(combination, "wrong", f"with a snapshot of each step: {answer}")
    snapshot = place / "first" / "snapshots" / f"step_{step:08}"
    answer = answer_of(
        [*combination.words_on(WAYS[combination.way].resumed_on), "run_dir=second", f"resume={snapshot}"], place
    )
    if answer.code:
        return refused_or_wrong(combination, answer)
    again = torch.load(place / "second" / "model.pt", weights_only=True)
    wrong = difference(again, found, CHANGES[combination.change].tolerance)
    last = json.loads((place / "second" / "run.json").read_text())["objective"]["last"]
    if not wrong and not math.isclose(last, loss, rel_tol=1e-3 if "fp32" in combination else 1e-9):
        wrong = f"test loss {last}, not {loss}"
    return Outcome(combination, "wrong", f"the resumed run: {wrong}") if wrong else None


def evaluate(combination: Combination, place: Path, found: dict[str, Any], loss: float) -> Outcome | None:
    ranks = [*FORK, "launch.nproc_per_node=2"] if len(combination.body) % 2 else []
    split = ["mode.split=val"] if TRUTHS[combination.kind](True).holds_out else []
    answer = _follow(combination, place, "mode=evaluate", "resume=run", *split, *ranks)
    if answer.code:
        return refused_or_wrong(combination, answer)
    if answer.problem():
        return Outcome(combination, "wrong", f"mode=evaluate: {answer}")
    value = json.loads((place / "run" / "evaluation.json").read_text())["metrics"]["loss"]
    if not math.isclose(value, loss, rel_tol=1e-3 if "fp32" in combination else 1e-9):
        return Outcome(combination, "wrong", f"mode=evaluate: loss {value}, not {loss}")
    return None


def _outputs(combination: Combination, weights: dict[str, Any]) -> Tensor:
    """What plain torch computes of the test data with the weights of the run."""
    model = first_model(combination.body, combination.kind)
    model.load_state_dict(weights)
    model.eval()
    with torch.no_grad():
        outputs: Tensor = model(TRUTHS[combination.kind](False).images)
    return outputs


def _computes_the_same(
    combination: Combination, trained_net: Callable[[Tensor], Tensor], found: dict[str, Any], what: str
) -> Outcome | None:
    """Of a net that takes samples as the data set gives them."""
    samples = _raw_samples(combination.kind)
    if samples is None:
        return None
    with torch.no_grad():
        outputs = trained_net(samples)
    if combination.body in DRAWS or TRUTHS[combination.kind](False).draws:
        return None
    apart = float((outputs.double() - _outputs(combination, found)[:4]).abs().max())
    return None if apart < 1e-3 else Outcome(combination, "wrong", f"{what}: {apart:.1e} from the right value")


LOADING = Lock()  # torch.export.load works in one thread at a time


def _raw_samples(kind: str) -> Tensor | None:
    """Some test samples as a data set gives them. None: they are more than one tensor each."""
    data = KINDS[kind](False)
    samples = [data[i] for i in range(4)]
    if not all(isinstance(sample, tuple) and isinstance(sample[0], Tensor) for sample in samples):
        return None
    return torch.stack([sample[0] for sample in samples])


def export(combination: Combination, place: Path, found: dict[str, Any], loss: float) -> Outcome | None:
    answer = _follow(combination, place, "mode=export", "resume=run")
    if answer.code:
        return refused_or_wrong(combination, answer)
    with LOADING:
        module = torch.export.load(place / "run" / "last.pt2").module()
    return _computes_the_same(combination, module, found, "mode=export")


def load(combination: Combination, place: Path, found: dict[str, Any], loss: float) -> Outcome | None:
    trained_net = lockstep.load(place / "run", model=new_net(combination.body, combination.kind))
    return _computes_the_same(combination, trained_net, found, "lockstep.load")


AFTERWARDS = {"nothing": nothing, "resume": resume, "evaluate": evaluate, "export": export, "load": load}
