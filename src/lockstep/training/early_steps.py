"""What is checked in the first steps of a process: that model and task fit together, that the task
returns sums, that an optimizer has all weights, and that each is trained.

With means the numbers would change with the number of ranks.
"""

import copy
import inspect
import logging
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.compat import non_persistent_buffers, versions
from lockstep.data.dataset import count_samples, map_tensors, tensors_in
from lockstep.data.partition import random_states_kept, seed_numpy_and_random
from lockstep.distributed.sync_batch_norm import BatchNorm, SyncBatchNorm
from lockstep.errors import ConfigError, first_of
from lockstep.strategies.base import WATCHED_STEPS, Strategy, weights_behind
from lockstep.tasks.base import OwnParts, Task, as_float64, modules_of
from lockstep.training.buffers import checksum
from lockstep.training.sample_noise import SampleNoise

log = logging.getLogger(__name__)

TOLERANCE = 1e-2  # relative, of a sum in half precision; a mean is off by half
FINE_TOLERANCE = 1e-4  # of one in float32, for a mean times the number of samples
CHECKED_AGAIN = (18, 15, 10, 1)  # watched steps that are left then: all outputs of a net that learned nothing are alike
STEPS_THAT_COUNT = 5  # a number that rises in each of so many is a count
LARGE = 10**5  # elements of an array, above which it is not looked at
UNSAVED = "persistent=False"
NAMED = 4  # parameters that a sentence names
EXPECTED = 20  # targets of a class that never comes
ROUNDING = 1e-9
PROBED = 2  # samples that are passed forward alone, and beside as many others
SHARES = ("accuracy", "precision", "recall", "f1", "iou")  # metrics from 0 to 1


class EarlySteps:
    """Checks the first batch that has two samples, some of those after it, and the first steps. Afterwards only
    metrics are looked at, where they are logged.

    Attributes:
    no_sums: names of what the task returns as a sum, and is none.
    unowned: what is said of weights that the loss depends on and that no parameter of the model is; or "".
    shared_draws: what is said of numbers that several parts of a batch share; or "".
    """

    def __init__(self, task: Task, strategy: Strategy, parts: int, noise: SampleNoise | None) -> None:
        """parts: in which a batch is passed forward, on all ranks together. noise: what sees the draws of them."""
        self.task, self.strategy, self.model, self.parts = task, strategy, strategy.model, parts
        self.depends_on_ranks = parts > 1 and bool(strategy.batch_norm_sees())
        self.noise = noise if self.depends_on_ranks else None
        self.is_checked = False
        self.steps_to_watch = WATCHED_STEPS
        self.no_sums: list[str] = []
        self.unowned: str | None = None
        self.shared_draws = ""
        self.without_gradient: dict[str, nn.Parameter] = {}
        self.impossible = set[str]()
        self.targets: Tensor | None = None  # how often each class came, (classes,)
        self.has_counted = False  # all targets of the watched steps, and the counts are not read yet
        self.twins = self._twins()  # until they are needed
        self.mixes: Tensor | None = None  # whether a sample's outputs depend on others, not read yet
        self.task_state = self._state_of_task()
        self.plain = _plain_state(dict(self.model.named_modules()))

    def _state_of_task(self) -> dict[str, Any]:
        """{name of what the task and its modules keep: its value, or which tensor it is, and how often changed}."""
        modules = modules_of(self.task)
        buffers = {
            f"{type(module).__name__}.{name}": (id(buffer), *versions([buffer]))
            for module in modules
            for name, buffer in module.named_buffers()
        }
        return buffers | _plain_state({type(part).__name__: part for part in [self.task, *modules]})

    def _twins(self) -> list[nn.Module]:
        """Two copies of the model. None where a batch is not cut into parts, or into the same ones by any number of
        ranks; for a model that cannot be copied; and for a batch norm without running statistics."""
        strategy, model = self.strategy, self.model
        norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
        has_parts_of_model = (
            strategy.shards_state or strategy.communicates_in_forward or not strategy.binds_one_device()
        )
        if has_parts_of_model or not self.depends_on_ranks or not all(norm.track_running_stats for norm in norms):
            return []
        shared = [norm.sum_in_place for norm in norms if isinstance(norm, SyncBatchNorm)]
        with suppress(Exception):  # of a tensor that was computed, a generator, a process group
            return [copy.deepcopy(model, {id(value): value for value in shared}) for _ in range(2)]
        return []

    def check_inputs(self, inputs: Any, samples: int = 0) -> None:
        """Raises ConfigError as `require_plain_inputs` does.

        samples: that each part of this batch has on all ranks, at least.
        """
        if not self.is_checked:
            require_plain_inputs(self.model, inputs)
        if self.twins and samples > 1:
            twins, self.twins = self.twins, []
            self.mixes = outputs_mix_samples(twins, inputs, min(samples // 2, PROBED))

    def check_outputs(self, outputs: Any, targets: Any) -> None:
        """Raises ConfigError as `require_one_tensor` and `find_no_sums` do."""
        if not self.is_checked:
            require_one_tensor(self.task, outputs, targets)
            no_sums = find_no_sums(self.task, outputs, targets)
            self.is_checked = no_sums is not None
            self.no_sums = no_sums or []

    def watch_loss(self, loss: Tensor, outputs: Any, targets: Any) -> None:
        """One loss of a step, before its backward pass."""
        if not self.steps_to_watch:
            return
        if self.unowned is None:
            self.unowned = "" if self.strategy.shards_state else weights_beside(self.model, loss)
            if self.unowned:
                log.warning("%s", self.unowned)
        are_classes = isinstance(outputs, Tensor) and isinstance(targets, Tensor) and targets.dtype == torch.int64
        if are_classes and outputs.dim() == 2 and targets.dim() == 1 and self.strategy.counts_samples():
            if self.targets is None:
                self.targets = torch.zeros(outputs.shape[1], device=outputs.device)
            inside = targets.clamp(0, len(self.targets) - 1)
            self.targets.index_add_(0, inside, (inside == targets).to(self.targets))

    @contextmanager
    def watching_draws(self) -> Iterator[None]:
        """In the block a part of a batch is passed forward and backward, with numpy and random seeded as for all."""
        if not self.steps_to_watch or self.parts == 1 or self.shared_draws:
            yield
            return
        before = _random_states()
        yield
        if self.noise is not None and self.noise.drawn_by_rank:
            log.warning("%s", self.noise.drawn_by_rank)
            self.noise = None
        drawn_from = [name for name, state in _random_states().items() if state != before[name]]
        if drawn_from:
            self.shared_draws = (
                f"the model or the loss draws from {' and '.join(drawn_from)}, which gives the same numbers to each of "
                f"the {self.parts} parts of a batch: right for one number that all samples share, and wrong for a "
                f"number of each sample; type torch.rand(len(<inputs>)) for these"
            )
            log.warning("%s", self.shared_draws)

    def after_backward(self) -> None:
        """The gradients of a step are there, one of those to watch."""
        if self.steps_to_watch > WATCHED_STEPS - STEPS_THAT_COUNT:
            self._look_for_counts()
        if self.steps_to_watch == WATCHED_STEPS:
            now = self._state_of_task()
            changed = [name for name, value in now.items() if self.task_state.get(name) != value]
            if changed:
                log.warning(
                    "the loss or the task changes %s in a step: each rank has its own value, and no snapshot has any; "
                    "keep it in the model, and type task._target_=<module>.<a task that takes it from there>",
                    first_of(changed),
                )
            self.without_gradient = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.without_gradient = {name: p for name, p in self.without_gradient.items() if p.grad is None}
        self.steps_to_watch -= 1
        if self.steps_to_watch in CHECKED_AGAIN and not self.no_sums:
            self.is_checked = False
        if self.steps_to_watch:
            return
        names = list(self.without_gradient)
        if names:
            log.warning(
                "%s got no gradient in %d steps, so it stays as it is; type parameters.freeze=[%s], or use it in the "
                "model",
                *(first_of(names), WATCHED_STEPS, ",".join(names[:NAMED])),
            )
        self.has_counted = True

    def _look_for_counts(self) -> None:
        """Log a warning for numbers that rise, and tensors and arrays that are changed in place, in each of the first
        steps, and are neither parameters nor buffers; and for buffers that change and that no state dict has."""
        now = _plain_state(dict(self.model.named_modules()))
        self.plain = {name: value for name, value in now.items() if _has_moved_on(self.plain.get(name), value)}
        if self.steps_to_watch > WATCHED_STEPS - STEPS_THAT_COUNT + 1:
            return
        unsaved = [name for name, value in self.plain.items() if isinstance(value, tuple) and value[0] == UNSAVED]
        plain = [name for name in self.plain if name not in unsaved]
        if plain:
            log.warning(
                "each step changes %s of the model, a plain attribute: no snapshot has it, and each rank has its own; "
                "type self.register_buffer(<name>, torch.tensor(<value>)) in __init__, and change it in place",
                first_of(plain),
            )
        if unsaved:
            log.warning(
                "each step changes the buffer %s of the model, and no snapshot has it, as it was registered with "
                "persistent=False; type self.register_buffer(<name>, <value>) without that",
                first_of(unsaved),
            )

    def watch_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log a warning, once, for a share of samples that is not from 0 to 1, and for a class that never came.

        Called by all ranks together, where they read values of the device anyway.
        """
        mixes, self.mixes = self.mixes, None
        if mixes is not None and mixes.item():
            log.warning(
                "%s gives a sample other outputs when other samples are beside it, so its numbers depend on how many "
                "parts a batch is cut into, unless it gathers the samples of all ranks itself; type mode=check for the "
                "layer, or strategy=virtual_ranks for the same numbers on any number of ranks",
                _class_name(self.model),
            )
        if self.has_counted:
            self.has_counted = False
            self._look_for_absent_classes()
        for name in SHARES:
            value = metrics.get(name, 0.0)
            if name not in self.impossible and (value < -ROUNDING or value > 1 + ROUNDING):
                self.impossible.add(name)
                log.warning(
                    "%s is %.4g, and a share is from 0 to 1: the task counts something twice, or adds up what is no "
                    "sum over the samples that its method count counts; correct its method __call__",
                    *(name, value),
                )

    def _look_for_absent_classes(self) -> None:
        counts = self.strategy.world.all_gather_json(None if self.targets is None else self.targets.tolist())
        classes = [sum(column) for column in zip(*filter(None, counts), strict=True)]
        absent = [str(number) for number, count in enumerate(classes) if not count]
        if absent and sum(classes) >= EXPECTED * len(classes):
            log.warning(
                "none of the first %d targets is of class %s, of %d classes; if the data has fewer, type "
                "dataset.classes=<how many>",
                *(sum(classes), first_of(absent), len(classes)),
            )


def _random_states() -> dict[str, Any]:
    state: Any = np.random.get_state()  # its name, its numbers, the place in them, and others
    return {"numpy.random": (state[1].tobytes(), state[2]), "random": random.getstate()}


def _plain_state(parts: Mapping[str, Any]) -> dict[str, Any]:
    """{name: value} of the attributes of `parts` that are numbers, or (which one it is, how often it was changed) of
    arrays, and of tensors that are no parameters and no buffers, also of those in lists and dicts, and in modules that
    these hold; and (UNSAVED, a checksum) of buffers that no state dict has."""
    modules = [part for part in parts.values() if isinstance(part, nn.Module)]
    known = {id(tensor) for module in modules for tensor in (*module.parameters(False), *module.buffers(False))}
    found: dict[str, Any] = {}
    for prefix, part in parts.items():
        for key in sorted(non_persistent_buffers(part)):
            if isinstance(buffer := getattr(part, key), Tensor) and not buffer.is_meta:
                found[f"{prefix}.{key}".lstrip(".")] = (UNSAVED, checksum(buffer))
        for key, value in vars(part).items():
            name = f"{prefix}.{key}".lstrip(".")
            is_count = isinstance(value, int) and not isinstance(value, bool)
            if is_count or (isinstance(value, float) and not key.startswith("_")):
                found[name] = value
            elif isinstance(value, Tensor | np.ndarray) or not key.startswith("_"):
                held = [part for part in _tensors_beside(value) if id(part) not in known]
                for place, tensor in enumerate(held):
                    found[f"{name}[{place}]" if tensor is not value else name] = (id(tensor), _version(tensor))
    return found


def _version(part: Any) -> int:
    """What is another number when a tensor, or an array that is not large, has been changed in place."""
    if isinstance(part, np.ndarray):
        return zlib.crc32(part.tobytes()) if part.size <= LARGE else 0
    return 0 if part.is_inference() else versions([part])[0]


def _tensors_beside(value: Any) -> Iterator[Any]:
    """A tensor or an array, or those in a list, tuple or dict, and in the modules that it holds."""
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_beside(item)


def _has_moved_on(before: Any, now: Any) -> bool:
    """Whether a number has risen, or a tensor or an array was changed in place."""
    if isinstance(before, tuple) and isinstance(now, tuple):
        return bool(before[0] == now[0] and before[1] != now[1])
    return isinstance(before, int | float) and isinstance(now, int | float) and now > before


def weights_beside(model: nn.Module, loss: Tensor) -> str:
    """A sentence about parameters that `loss` depends on and `model` does not have; empty if there are none."""
    own = {id(parameter) for parameter in model.parameters()}
    behind = (weight for weight in weights_behind([loss.grad_fn]) if isinstance(weight, nn.Parameter))
    others = {id(parameter): parameter for parameter in behind if id(parameter) not in own}
    if not others:
        return ""
    places = [
        f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_") and any(id(p) in others for p in _tensors_beside(value))
    ]
    shapes = ", ".join(str(list(p.shape)) for p in list(others.values())[:NAMED])
    where = f"{first_of(places)}" if places else "the task, or a module that the model does not hold"
    return (
        f"no optimizer has {len(others)} weights that the loss depends on, of shapes {shapes}, in {where}: they are "
        f"never trained, saved or moved to a device; put layers into torch.nn.ModuleList, and tensors into "
        f"torch.nn.ParameterList"
    )


def outputs_mix_samples(twins: Sequence[nn.Module], inputs: Any, samples: int) -> Tensor | None:
    """0-d: whether the outputs of the first `samples` of `inputs` are others when as many more are passed forward, too.

    twins: two copies of a model, which are changed. They train, but their batch norms use the running statistics. What
    is drawn is the same for a sample; None where a draw belongs to no sample, or a copy fails.
    """
    rows, found = count_samples(inputs), []
    for twin, count in zip(twins, (samples, 2 * samples), strict=True):
        twin.train()
        for module in twin.modules():
            if isinstance(module, BatchNorm):
                module.eval()
        noise = SampleNoise().of(0, count, 2 * samples)
        with random_states_kept(), torch.no_grad(), suppress(Exception):  # the step will raise it, with its place
            seed_numpy_and_random(0)
            torch.manual_seed(0)
            with noise:
                found.append(list(tensors_in(twin(_rows(inputs, slice(count), rows)))))
        if noise.drawn_by_rank:
            return None
    if len(found) < len(twins):
        return None
    apart = [
        (alone - beside[:samples]).abs().max() > torch.finfo(alone.dtype).eps ** 0.5 * beside.abs().max()
        for alone, beside in zip(*found, strict=False)
        if alone.dim() and alone.is_floating_point() and alone.shape == beside[:samples].shape and alone.numel()
    ]
    return torch.stack(apart).any() if apart else None


def require_plain_inputs(model: nn.Module, inputs: Any) -> None:
    """Raise ConfigError if the samples are dicts whose values `model` takes by name, as nets of transformers do."""
    if not isinstance(inputs, Mapping):
        return
    parameters = inspect.signature(model.forward).parameters
    if all(name in parameters for name in inputs):
        raise ConfigError(
            f"{_class_name(model)} takes {', '.join(inputs)} by name, and a model gets all inputs as one value, here a "
            f"dict; type model._target_=<module>.<a class that calls it with **inputs>, as in docs/language_models.md"
        )


def require_one_tensor(task: Task, outputs: Any, targets: Any) -> None:
    """Raise ConfigError if a task of this project gets something else than a tensor, such as the object with logits
    that a net of transformers returns. A task of the user's may take anything."""
    if not _is_ours(task):
        return
    if isinstance(outputs, Tensor):
        if not isinstance(targets, Tensor):
            found = f"{type(targets).__name__}" + (f" of {', '.join(targets)}" if isinstance(targets, Mapping) else "")
            raise ConfigError(
                f"a target is a {found}, and {type(task).__name__} needs one tensor; return (inputs, one tensor) from "
                f"__getitem__, or type task._target_=<module>.<a task that takes it>"
            )
        return
    found = f"an object of {type(outputs).__name__}"
    if hasattr(outputs, "logits"):
        raise ConfigError(
            f"the model returns {found}, and {type(task).__name__} needs its logits alone; type "
            f"model._target_=<module>.<a class that returns the logits>, as in docs/language_models.md"
        )
    raise ConfigError(
        f"the model returns {found}, and {type(task).__name__} needs one tensor; type "
        f"model._target_=<module>.<a class that returns one>, or task._target_=<module>.<a task that takes it>"
    )


def find_no_sums(task: Task, outputs: Any, targets: Any) -> list[str] | None:
    """Compare what `task` gives for these samples with what it gives for their halves. None: one sample has none.

    Returns the names of what is no sum over the samples.

    Raises ConfigError for a mean, and for what is not (loss, {name: sum}). Logs a warning for what is no sum either,
    such as a loss that compares the samples of a batch with each other. The tasks of this project have tests for it: no
    step of theirs waits for a GPU.
    """
    own = getattr(task, "own", None)
    has_own_parts = isinstance(own, OwnParts) and bool(own.loss is not None or own.measures)
    if _is_ours(task) and not has_own_parts:
        return []
    count = count_samples(targets)
    if count < 2:
        with torch.no_grad(), random_states_kept():
            _require_form(task, task(outputs, targets))
        return None
    half = count // 2
    is_half_precision = any(tensor.is_floating_point() and tensor.itemsize < 4 for tensor in tensors_in(outputs))
    tolerance = TOLERANCE if is_half_precision else FINE_TOLERANCE
    with torch.no_grad():
        whole = _values(task, outputs, targets)
        try:
            first, second = (
                _values(task, *(_rows(values, part, count) for values in (outputs, targets)))
                for part in (slice(half), slice(half, None))
            )
        except Exception:  # halves of this batch are no batches, as where a collate_fn packs sequences
            return []
    no_sums = []
    for name, value in whole.items():
        if _is_close(value, first[name], second[name], tolerance):
            continue
        no_sums.append(name)
        parts = half * first[name] / count, (count - half) * second[name] / count
        if not _is_ours(task) and _is_close(value, *parts, TOLERANCE):
            raise ConfigError(
                f"{_class_name(task)} returns a mean as its {name}, and the number of ranks would change it; return a "
                f'sum over samples instead, and type reduction="sum" where it calls a loss of torch'
            )
        key = "task.loss" if name == "loss" else f"task.measures.{name}"
        log.warning(
            "%s does not add up over the samples of a batch: it will be another number at another number of "
            "ranks or another gradient accumulation",
            key if _is_ours(task) else f"{name} of {_class_name(task)}",
        )
    return no_sums


def _is_ours(task: Task) -> bool:
    return type(task).__module__.startswith("lockstep.")


def _require_form(task: Task, found: Any) -> None:
    """Raise ConfigError if `found` is not what a task returns."""
    named_sums = ", ".join(f'"{name}": <sum>' for name in task.sums)
    name, advice = _class_name(task), f"type return loss, {{{named_sums}}}"
    if not isinstance(found, tuple) or len(found) != 2:
        number = f"{len(found)} values" if isinstance(found, tuple) else f"one {type(found).__name__}"
        raise ConfigError(f"{name} returns {number}, and the loss and a dict of sums are wanted; {advice}")
    loss, sums = found
    if not isinstance(sums, Mapping) or "loss" not in sums:
        what = (
            f"a dict of {', '.join(map(str, sums)) or 'nothing'}"
            if isinstance(sums, Mapping)
            else f"a {type(sums).__name__}"
        )
        raise ConfigError(f"{name} returns {what} beside the loss, and a dict of sums is wanted; {advice}")
    for key, value in {"loss": loss, **sums}.items():
        if not isinstance(value, Tensor):
            raise ConfigError(f"{name} returns a {type(value).__name__} as its {key}, and a tensor is wanted; {advice}")
        if value.numel() != task.sums.get(key, value.numel()):
            raise ConfigError(
                f"{name} returns the shape {list(value.shape)} as its {key}, and a sum over the samples is wanted; "
                f"type {key}.sum()"
            )


def _rows(values: Any, part: slice, count: int) -> Any:
    """What has no row for each of `count` samples, such as a loss that the model adds, belongs to the whole batch."""
    return map_tensors(lambda tensor: tensor[part] if tensor.shape[:1] == (count,) else tensor, values)


def _values(task: Task, outputs: Any, targets: Any) -> dict[str, Tensor]:
    with random_states_kept():  # a resumed run looks again, at another step
        found = task(outputs, targets)
    _require_form(task, found)
    loss, sums = found
    return {"loss": as_float64(loss)} | {name: as_float64(value) for name, value in sums.items() if name != "loss"}


def _is_close(whole: Tensor, first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Whether the parts add up to the whole, relative to what is added: parts of opposite signs may cancel."""
    size = torch.maximum(whole.abs(), first.abs() + second.abs())
    return bool(((whole - first - second).abs() <= tolerance * size).all())


def _class_name(part: Task | nn.Module) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"
