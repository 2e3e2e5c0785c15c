"""Nets x data x ranks x options x what comes after: each gives the numbers of plain torch, or one sentence.

A combination is one value of each axis. In those of `covering(2)` any two values of two axes meet; `drawn` draws as
many as are asked for. The right numbers are those of `oracle`, which is plain torch in one process.
`make zoo` prints a table.
Where a net or its data draws, they are those of the run on one rank without the options that change nothing.
"""

import itertools
import json
import math
import random
import shutil
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

import lockstep
from support.commands import ROOT, ema
from support.small_commands import answer_of
from zoo.data import KINDS, TRUTHS, words_of
from zoo.data import REFUSED as REFUSED_KINDS
from zoo.modules import BODIES
from zoo.oracle import BATCH, EPOCHS, LR, Numbers, first_model, new_net, trained

CONF = ["--config-dir", str(ROOT / "tests" / "zoo" / "conf")]
FORK = ["launch=fork", "backend=gloo"]
COMMON = ["model=linear", "model._target_=zoo.modules.net", f"trainer.batch_size={BATCH}", f"trainer.epochs={EPOCHS}"]
COMMON += [f"optimizer.lr={LR}", "scheduler=constant", "monitor=val/loss", "logger=[]", "snapshot.keep_last=100"]
COMMON += ["watch.timeout=60", "watch.weights_every=1", "trainer.precision=fp64"]


class Way(NamedTuple):
    """Ranks, and how they share the work. resumed_on: ranks of a run that goes on from a snapshot of this one.
    micro_batches: that a pipeline cuts a batch into, one after the other."""

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
    "frozen stem": Change(("parameters.freeze=[stem]",), Numbers(frozen="stem.")),
    "slow head": Change((f"parameters.groups=[{{match:head.*,lr:{LR / 10}}}]",), Numbers(slow="head.")),
    "cosine": Change(("scheduler=cosine", "scheduler.warmup_epochs=0"), Numbers(cosine=True)),
    "one_cycle": Change(("scheduler=one_cycle", "optimizer.momentum=0"), Numbers(one_cycle=True)),
    "whole batch": Change(("trainer.batch_size=22",), Numbers(batch=22)),
    "stopped": Change(("trainer.max_steps=4",), Numbers(steps=4)),
    "fp32": Change(("trainer.precision=fp32",), Numbers(), 1e-3),
}
ALL = (*CHANGES["accumulation"].words, *CHANGES["clipping"].words, ema(0.8), *CHANGES["frozen stem"].words)
CHANGES["all"] = Change(ALL, Numbers(accumulation=2, clip=0.05, ema=0.8, frozen="stem."))
for name in OWN_OPTIMIZERS:
    own = ("optimizer=sgd", f"optimizer._target_=zoo.optimizers.{name}", f"optimizer.lr={LR}")
    CHANGES[name] = Change(own, Numbers(own=name))
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
AFTER = {"nothing": 0, "load": 0, "evaluate": 1, "export": 2, "resume": 2}  # and how long it takes
# Nets that draw in a forward pass, and those whose state a forward pass changes.
DRAWS = ("dropout", "dropped_channels", "dropped_lstm", "dropped_attention", "dropped_encoder", "Noise")
DRAWS += ("Checkpointed", "Residual", "Mixed", "NoisyWeights", "Coin", "AlwaysNoise")
CHANGED = ("RunningScale", "Codebook", "Teacher", "CountingBuffer", "AlwaysCounting", "ExtraState", "spectral_norm")
CHANGED += ("old_spectral_norm", "running_instance_norm", "batch_norm_1d", "batch_norm_2d", "batch_norm_cumulative")
CHANGED += ("batch_norm_plain", "two_batch_norms", "lazy_batch_norm", "Residual")
SEVERAL = {way for way in WAYS if WAYS[way].ranks > 1}
# Values of two axes that no command has together: one of them is refused there, which other tests hold.
NEVER = [
    # Each rank has buffers of its own there, as docs/promise.md says; mode=check names them. And draws in evaluations.
    ({"RunningScale", "Codebook", "running_instance_norm", "AlwaysNoise"}, SEVERAL | {"resume"}),
    # A later part of a step that leaves weights out is a hang, whose cause is told; gloo itself may end ranks that add
    # up gradients of other weights.
    ({"Experts", "LateExperts"}, {"accumulation", "all", *FSDP, "tensor_parallel, two by two"}),
    # fsdp forgets what a forward pass changes in gathered weights; mode=check finds other numbers on two ranks.
    ({"Teacher"}, {*FSDP, "tensor_parallel, two by two"}),
    ({"Teacher", "EmbeddedMaxNorm"}, {*VIRTUAL}),  # nor does each virtual rank begin with the weights before the step
    ({"scaled_batches"}, {"small evaluations"}),  # its collate_fn draws for a batch, in evaluations, too
    ({"accumulation", "all"}, {*VIRTUAL, "tensor_parallel, two by two"}),  # a batch norm gets single samples there
    ({*OWN_OPTIMIZERS}, {*WAYS} - {"one", "two", "three"} | {"unfused", *CHANGED}),
]
# {what a refusal says: the two values, of two axes, that it is of; an empty set is any value}
CUT_BY_ONE = {"Complex", "OddParameters", "scripted", "spectral_norm", "old_spectral_norm", "weight_norm", "orthogonal"}
SOME_UNUSED = {"Unused", "Experts", "LateExperts", "Reentrant"}
REFUSALS = {
    "max_norm=": ({"EmbeddedMaxNorm"}, SEVERAL | {"resume", "evaluate"}),
    "find_unused_parameters=true": (SOME_UNUSED, SEVERAL - {"two, unused"} | {"resume", *VIRTUAL}),
    "adds up gradients of one real type": ({"Complex", "OddParameters"}, set(VIRTUAL)),
    "its weights are in model.pt": (set(), {"export"}),
    "use_reentrant=False": ({"Reentrant"}, {"two, unused"}),
    "finds shapes without values": ({"Experts", "LateExperts"}, {"pipeline"}),
    "make no batch of inputs and targets": ({"numpy_flipped"}, set()),
    "add up dense gradients": ({"EmbeddedSparse"}, SEVERAL | {"resume"}),
    "type optimizer=sgd, or make the embedding": ({"EmbeddedSparse"}, {"adamw"}),
    "has a hook for its gradient": ({"OwnFunction"}, {*FSDP, *TENSOR_PARALLEL}),
    "passes one tensor from rank to rank": ({"dicts", "dicts_of_two", "nested"}, {"pipeline"}),
    "keeps beside its tensors": ({"ExtraState"}, set(VIRTUAL)),
    "batch norm has one value": ({name for name in CHANGED if "norm" in name} | {"Residual"}, {"pipeline"}),
    "changes a value in place": ({"Teacher"}, {"pipeline"}),
    "would change it twice": ({"Teacher"}, {"checkpointed"}),
    "cannot compute body again": ({"scripted"}, {"checkpointed"}),
    "cannot cut the model, or the optimizer": ({"amounts"}, {*TENSOR_PARALLEL}),  # one output for two ranks
    "cannot cut the model": (CUT_BY_ONE, {*SHARDED, "model_parallel"}),
    "weight is also one of another layer": ({"Tied", "twice_the_same"}, set(TENSOR_PARALLEL)),
    "and the classes are 0 to 3": ({"stray_classes", "binary_masks"}, set()),
    "and its labels are 0 or 1": ({"stray_labels"}, set()),
    "class 0 is a in the training data and d in the test data": ({"names_in_another_order"}, set()),
}
AXES = {"body": [*BODIES], "kind": [kind for kind in KINDS if kind not in REFUSED_KINDS]}
AXES |= {"way": [*WAYS], "change": [*CHANGES], "equal": [*EQUAL], "after": [*AFTER]}


class Combination(NamedTuple):
    body: str
    kind: str
    way: str = "one"
    change: str = "none"
    equal: str = "none"
    after: str = "nothing"

    def __str__(self):
        return " | ".join(self)

    @property
    def words(self):
        return self.words_on(WAYS[self.way].ranks)

    def words_on(self, ranks):
        """The command on another number of ranks."""
        truth, way = TRUTHS[self.kind](True), WAYS[self.way]
        words = [*COMMON, f"+model.body={self.body}", *words_of(self.kind), f"task={truth.task}", *truth.words]
        if self.way in TENSOR_PARALLEL:  # it cuts linear layers, so no stem of images
            stem = "" if BODIES[self.body][0] == "map" else "{stem.layer:gathered},"
            plan = f"strategy.parallelize_plan=[{stem}{{head.layer:gathered}},{PLANS.get(self.body, '')}]"
            words.append(plan.replace(",]", "]"))
        words += [*way.words, *CHANGES[self.change].words, *EQUAL[self.equal]]
        if ranks > 1:
            words += [*FORK, f"launch.nproc_per_node={ranks}"]
        return list({word.partition("=")[0]: word for word in words}.values())


ONCE = [
    *(Combination("linear", kind, "two") for kind in REFUSED_KINDS),
    # What a net changes in an evaluation is put back, buffers and weights.
    Combination("AlwaysCounting", "tensors", "one", after="resume"),
    Combination("AlwaysCounting", "tensors", "two", equal="small evaluations"),
    Combination("EmbeddedMaxNorm", "tensors", "one"),
    # Weights that some ranks do not need in a step, and what an optimizer keeps.
    Combination("Experts", "tensors", "two, unused", "accumulation", after="resume"),
    *(Combination("batch_norm_1d", "tensors", "two", name, after="resume") for name in OWN_OPTIMIZERS),
    *(Combination("Experts", "tensors", way) for way in ("two, all_reduce", "three, parameter_server", "fsdp, two")),
    *(Combination("Unused", "tensors", way) for way in ("two, ring", "fsdp, two", "virtual_ranks, one")),
    Combination("LateExperts", "tensors", "virtual_ranks"),
]


def drawn(count, seed, **fixed):
    """So many combinations, drawn by `seed`. fixed: values of some axes."""
    draws, found = random.Random(str(seed)), []
    while len(found) < count:
        made = Combination(*(fixed.get(axis) or draws.choice(values) for axis, values in AXES.items()))
        if not _is_never(made):
            found.append(made)
    return found


def covering(size):
    """Few combinations in which any `size` values of different axes meet: the next one has a group of values that is
    missing, and of those drawn with it the most; of several, it has the fewest ranks and ends soonest."""
    missing = {
        group
        for axes in itertools.combinations(AXES, size)
        for group in itertools.product(*[[(axis, value) for value in AXES[axis]] for axis in axes])
        if not _is_never([value for _, value in group])
    }
    found = []
    while missing:
        start = min(missing)
        made = [(one, _groups(one, size) & missing) for one in drawn(20, start, **dict(start))]
        best, new = max(made, key=lambda one: (len(one[1]), -WAYS[one[0].way].ranks - AFTER[one[0].after]))
        missing -= new
        found.append(best)
    return found


def _groups(combination, size):
    return set(itertools.combinations(zip(AXES, combination, strict=True), size))


def _is_never(values):
    return any(
        (one in some and other in others) or (other in some and one in others)
        for one, other in itertools.combinations(values, 2)
        for some, others in NEVER
    )


class Outcome(NamedTuple):
    """result: equal, ran (where no right number is known), refused, or wrong. why: the sentence, or what is wrong."""

    combination: Combination
    result: str
    why: str = ""


class Refused(Exception):
    """A command ended with a sentence that it must end with."""


class Zoo:
    """Runs combinations in a folder. Runs on one rank that several of them are compared with are kept."""

    def __init__(self, folder):
        self.folder, self.lock, self.numbers = folder, Lock(), itertools.count()

    def outcomes(self, chosen, at_once):
        with ThreadPoolExecutor(at_once) as threads:
            yield from threads.map(self.outcome, chosen)

    def outcome(self, combination):
        place = self.folder / str(next(self.numbers))
        place.mkdir(parents=True)
        try:
            return Outcome(combination, self._judged(combination, place))
        except Refused as refused:
            return Outcome(combination, "refused", str(refused))
        except Exception as error:  # also of a comparison: a file is missing, a key, a shape
            return Outcome(combination, "wrong", f"{type(error).__name__}: {error}")
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _judged(self, combination, place):
        run(combination, place, *combination.words, "run_dir=run")
        right = self.right(combination)
        found, loss = result_of(place / "run")
        if right is None:
            floats = [value for value in found.values() if isinstance(value, Tensor) and value.is_floating_point()]
            assert all(value.isfinite().all() for value in floats), "not finite"
            return "ran"
        compare((found, loss), right, combination.change)
        AFTERWARDS[combination.after](combination, place, (found, right[1]))
        return "equal"

    def right(self, combination):
        """What the combination must give. None: nobody knows it."""
        body, kind, way, change, _, _ = combination
        is_drawn = TRUTHS[kind](True).draws or body in DRAWS or (body == "lazy_linear" and change == "fp32")
        has_own_state = body in CHANGED and way in (*VIRTUAL, "tensor_parallel, two by two")
        is_refused = body == "EmbeddedSparse" and change == "adamw"  # by torch; virtual ranks have dense gradients
        if not is_drawn and not has_own_state and not is_refused:
            numbers = CHANGES[change].numbers
            numbers = replace(numbers, accumulation=numbers.accumulation * WAYS[way].micro_batches)
            return trained(kind, numbers, first_model(body, kind))
        if body in CHANGED and way in VIRTUAL:  # each virtual rank begins with the state before the step
            return self._plain_run(Combination(body, kind, "virtual_ranks, one", change))
        if is_refused or (way in ("pipeline", *TENSOR_PARALLEL) and body in (*DRAWS, *CHANGED)):
            return None  # a stage draws by itself, and a rank for its part of the model
        return self._plain_run(Combination(body, kind, change=change))

    def _plain_run(self, combination):
        place = self.folder / "plain" / str(combination).replace(" ", "_")
        with self.lock:
            if not place.exists():
                place.mkdir(parents=True)
                answer_of([*CONF, *combination.words, "run_dir=run"], place)
        return result_of(place / "run") if (place / "run" / "model.pt").exists() else None


SAYING = ("lockstep: ", "what it means: ", "what to do: ", "it ended: ")  # how the lines begin that say what to type


def run(combination, place, *words):
    """A command, which ends well, or with a sentence of REFUSALS."""
    answer = answer_of([*CONF, *words], place)
    if not answer.code and not answer.problem():
        return
    for phrase, (some, others) in REFUSALS.items():
        told = [line for line in answer.output.splitlines() if phrase in line and line.strip().startswith(SAYING)]
        if told and (not some or some & set(combination)) and (not others or others & set(combination)):
            raise Refused(told[0])
    raise AssertionError(str(answer))


def result_of(folder):
    last = json.loads((folder / "run.json").read_text())["objective"]["last"]
    return torch.load(folder / "model.pt", weights_only=True), last


def compare(found, right, change):
    """Of two runs. Raises an error with what differs."""
    (weights, loss), (right_weights, right_loss), tolerance = found, right, CHANGES[change].tolerance
    tensors = {name: value for name, value in right_weights.items() if isinstance(value, Tensor)}
    assert {name for name in weights if isinstance(weights[name], Tensor)} == tensors.keys(), sorted(weights)
    for name, value in tensors.items():
        is_exact = not (value.is_floating_point() or value.is_complex())
        limit = 0.0 if is_exact or not value.numel() else tolerance * max(1.0, float(value.abs().max()))
        options = {"rtol": 0, "atol": limit, "check_dtype": tolerance <= 1e-6}
        torch.testing.assert_close(weights[name], value, **options, msg=lambda said: f"{name}: {said}")  # noqa: B023
    assert math.isclose(loss, right_loss, rel_tol=tolerance, abs_tol=tolerance), f"loss {loss}, not {right_loss}"


def resume(combination, place, right):
    """From the snapshot of a step in mid-epoch, on another number of ranks, to the same end."""
    step = 1 if combination.change == "whole batch" else 2
    run(combination, place, *combination.words, "run_dir=first", "snapshot.every=1steps")
    again = combination.words_on(WAYS[combination.way].resumed_on)
    run(combination, place, *again, "run_dir=second", f"resume={place}/first/snapshots/step_{step:08}")
    compare(result_of(place / "second"), right, combination.change)


def evaluate(combination, place, right):
    ranks = [*FORK, "launch.nproc_per_node=2"] if len(combination.body) % 2 else []
    split = ["mode.split=val"] if TRUTHS[combination.kind](True).holds_out else []
    run(combination, place, "mode=evaluate", "resume=run", *split, *ranks)
    loss = json.loads((place / "run" / "evaluation.json").read_text())["metrics"]["loss"]
    compare((right[0], loss), right, combination.change)


def _computes_the_same(combination, trained_net, place):
    """As plain torch with the weights of the run. Of a net that takes samples as the data set gives them."""
    body, kind, *_ = combination
    data = KINDS[kind](False)
    samples = [data[i] for i in range(4)]
    if not all(isinstance(sample, tuple) and isinstance(sample[0], Tensor) for sample in samples):
        return  # they are more than one tensor each
    with torch.no_grad():
        outputs = trained_net(torch.stack([sample[0] for sample in samples]))
        if body not in DRAWS and not TRUTHS[kind](False).draws:
            model = first_model(body, kind).eval()
            model.load_state_dict(torch.load(place / "run" / "model.pt", weights_only=True))
            assert (outputs.double() - model(TRUTHS[kind](False).images)[:4]).abs().max() < 1e-3


LOADING = Lock()  # torch.export.load works in one thread at a time


def export(combination, place, right):
    run(combination, place, "mode=export", "resume=run")
    with LOADING:
        module = torch.export.load(place / "run" / "last.pt2").module()
    _computes_the_same(combination, module, place)


def load(combination, place, right):
    trained_net = lockstep.load(place / "run", model=new_net(combination.body, combination.kind))
    _computes_the_same(combination, trained_net, place)


def nothing(combination, place, right): ...


AFTERWARDS = {made.__name__: made for made in (nothing, resume, evaluate, export, load)}


def main():
    """Words: how many combinations are drawn, and a seed."""
    count, seed = (int(word) for word in (*sys.argv[1:], "0", "0")[:2])
    torch.set_num_threads(1)
    chosen, wrong = [*ONCE, *covering(2), *drawn(count, seed)], []
    results = {axis: {value: Counter() for value in values} for axis, values in AXES.items()}
    with tempfile.TemporaryDirectory() as folder:
        for outcome in Zoo(Path(folder)).outcomes(chosen, at_once=2):
            for axis, value in zip(AXES, outcome.combination, strict=True):
                results[axis].setdefault(value, Counter())[outcome.result] += 1
            if outcome.result == "wrong":
                wrong.append(outcome)
                print(f"{outcome.combination}\n{outcome.why}\n", flush=True)
    print(f"| {'what':28} | equal | ran | refused | wrong |\n|---|---|---|---|---|")
    for axis, values in results.items():
        for value, found in values.items():
            shown = " | ".join(f"{found[result]:5}" for result in ("equal", "ran", "refused", "wrong"))
            print(f"| {axis + ' ' + value:28} | {shown} |")
    print(f"{len(chosen)} combinations, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
