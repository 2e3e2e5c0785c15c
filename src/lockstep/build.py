"""Builds the parts of a job, each once: before a process starts those that are checked and handed to all ranks, and in
each rank data, then model, then what trains.

What draws random numbers has a seed block of its own, so that it does not depend on what was built before.
"""

import gc
import importlib.util
import os
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lockstep.config.check import check_nodes, instantiate, instantiate_as, locate, nodes_in
from lockstep.config.record import ConfigRecord
from lockstep.config.schema import RunConfig, time_limit
from lockstep.data.build import build_data, completed, loader_of, prepare_first, reader_of
from lockstep.data.loader import InputConverter, Progress
from lockstep.data.partition import seeded
from lockstep.data.reader import SampleReader, request_of
from lockstep.data.source import Tensors, class_names, map_tensors, of_each_sample, unwrapped
from lockstep.distributed import environment, signals
from lockstep.distributed.sync_batch_norm import convert_sync_batch_norm
from lockstep.distributed.world import World, choose_backend, require_same
from lockstep.errors import ConfigError, first_line
from lockstep.failures.record import heartbeat
from lockstep.files import short_hash
from lockstep.launchers.base import Launcher
from lockstep.loggers.base import Logger, Loggers, RunInfo
from lockstep.models.base import WeightsFromData, give_shapes, has_lazy_layers
from lockstep.modes.base import Mode, Parts
from lockstep.runs.record import SWEEP, RunRecord, read_run
from lockstep.runs.stats import SAMPLES
from lockstep.snapshots.checkpointer import Checkpointer
from lockstep.snapshots.files import list_snapshots, named_snapshots, snapshots_to_try
from lockstep.snapshots.initial_weights import freeze, load_initial_weights
from lockstep.strategies.base import JobSpec, Strategy, model_dtype
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.tasks.base import Task
from lockstep.training import setup
from lockstep.training.callbacks import Callback
from lockstep.training.evaluate import Evaluator
from lockstep.training.metrics import Meter
from lockstep.training.optimizers import build_optimizer, can_fuse
from lockstep.training.rng import Draws
from lockstep.training.run import Clock, Loaders, Run
from lockstep.training.schedules import Schedule, TorchSchedule
from lockstep.training.step import Step

LARGEST_TENSOR = 2**30  # bytes; a larger one may be a file that is mapped into memory, and is sampled
TENSOR_ROWS = 64  # sampled of such a tensor
SAME_DATA = "copy the same data to every machine and type the command again"
LONGEST = 2000  # names of classes, or numbers of validation samples, in run.json


def preflight(config: RunConfig, starts: bool = True) -> Parts:
    """The parts of a job. Raises ConfigError for whatever can be known to fail. starts: False for a job of a sweep that
    starts later. Nothing is begun or written, and no data is prepared."""
    check_nodes(config.launch, "launch")
    check_nodes(config.mode, "mode")
    launcher, mode = instantiate_as(Launcher, config.launch, "launch"), instantiate_as(Mode, config.mode, "mode")
    if not starts and not mode.trains:
        raise ConfigError(f"mode={mode.name} is no training, and a sweep trains; type the command without -m")
    parts = build_parts(config, launcher, mode)
    if starts:
        begin(config, parts)
    gc.freeze()  # what has been imported stays
    gc.enable()
    return parts


def begin(config: RunConfig, parts: Parts) -> None:
    """What comes first in the process that starts a job."""
    if not (parts.mode.starts_ranks or parts.launcher.runs_elsewhere):
        signals.set_run_folder(config.run_dir)
        if parts.launcher.starts_processes:
            prepare_first(config)


def build_parts(config: RunConfig, launcher: Launcher, mode: Mode) -> Parts:
    """The parts, checked against each other, this machine and what the config names. Nothing is started or written."""
    check_nodes(config)
    for name, node in config.logger.items():
        package = getattr(locate(f"logger.{name}", node["_target_"]), "package", "")
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(f"logger={name} needs {package}; type pip install {package}")
    for node in config.callbacks:
        own = [name for name in vars(locate("callbacks", node["_target_"])) if name.startswith("on_")]
        if unknown := [name for name in own if not hasattr(Callback, name)]:
            what = f"{node['_target_']}.{unknown[0]} is never called"
            raise ConfigError(f"{what}; type in its place <on_step_end, or what else Callback has>")
    path = config.optimizer["_target_"]
    if path.startswith("torch.optim."):  # which refuses some hyperparameters: it is asked with one small weight
        try:
            instantiate(config.optimizer, [torch.nn.Parameter(torch.zeros(2, 2))])
        except Exception as error:
            raise ConfigError(f"{path} refuses its arguments ({first_line(error)}); type optimizer=sgd") from None
    strategy = instantiate_as(Strategy, config.strategy, "strategy")
    gradient_sync = instantiate_as(GradientSync, config.gradient_sync, "gradient_sync")
    launcher.validate()
    job, folder = job_spec(config, launcher), Path(config.run_dir)
    if mode.trains:
        if not list_snapshots(folder / "snapshots"):
            named_snapshots(config.resume)
        if config.snapshot.mirror is not None:
            instantiate(config.snapshot.mirror).require_free(config.resume, folder)
    elif mode.needs_run:
        snapshots_to_try(config.resume, mode.snapshot, mode.name)
    elif config.resume is not None:
        what = f"mode={mode.name} reads no run; leave resume={config.resume} out"
        raise ConfigError(f"{what}, or type parameters.init=<a run> for its weights")
    mode.validate(job)
    strategy.validate(job)
    if not mode.needs_run:
        check_batch_size(config, strategy.data_share_of(job.world_size))
    return Parts(launcher, mode, strategy, gradient_sync)


def job_spec(config: RunConfig, launcher: Launcher) -> JobSpec:
    """What the config asks for. Raises ConfigError if this machine lacks the backend."""
    (world_size, ranks_here), name = launcher.num_ranks(), config.backend.name
    started_by = "fork" if launcher.starts_processes else environment.read_rank_info().started_by
    info = environment.RankInfo(0, world_size, 0, ranks_here, started_by)
    # Another machine may have the GPUs that this one lacks.
    chosen = name if launcher.runs_elsewhere else choose_backend(name, info)
    has_own_step = locate("step", config.step["_target_"]) is not Step
    gradient_sync = locate("gradient_sync", config.gradient_sync["_target_"])
    return JobSpec(config, world_size, chosen == "nccl", has_own_step, gradient_sync)


def check_batch_size(config: RunConfig, shares: int) -> int:
    """Samples of a global batch, which is cut into `shares`. Raises ConfigError if a rank would get none."""
    trainer, steps = config.trainer, config.trainer.gradient_accumulation_steps
    batch_size = trainer.batch_size if trainer.batch_size_per_rank is None else trainer.batch_size_per_rank * shares
    if batch_size < shares * steps:
        cut_into = [f"{shares} ranks"] * (shares > 1) + [f"{steps} micro-batches"] * (steps > 1)
        what = f"trainer.batch_size={batch_size} is too small for {' and '.join(cut_into)}"
        raise ConfigError(f"{what}; type trainer.batch_size={shares * steps} or more")
    return batch_size


# What each rank builds.


def build_run(config: RunConfig, world: World, parts: Parts) -> Run:
    """The run of this rank. Its `config` has what the data tells. A collective."""
    heartbeat.enter("prepare")
    world.once_per_machine(lambda: prepare_first(config))
    heartbeat.enter("build")
    for key, node in nodes_in(config):  # a module that seeds torch when it is imported does so here
        locate(key, node["_target_"])
    data, split = build_data(config, parts.mode.reads_training_data), None
    same = {"the test data": f"{len(data.test)} samples, {data_fingerprint(data.test)}"}
    if data.val is not None:
        split, (_, numbers) = f"{len(data.val)} samples of {data_fingerprint(data.val)}", unwrapped(data.val)
        split += "" if numbers is None else f", the samples {short_hash(numbers.tobytes())}"
        same["the validation data"] = split
    require_same(world, same, SAME_DATA)
    config = completed(config, data)
    check_nodes(config.model, "model")  # with the shape that the data tells
    with seeded(config.seed):
        task = instantiate_as(Task, config.task, "task")
    # Losses are of float32 at least.
    dtype, progress = torch.float64 if config.trainer.precision == "fp64" else torch.float32, Progress()
    has_all = parts.strategy.data_share_of(world.size) == world.size and parts.strategy.passes_whole_batches
    task.start(world, progress, dtype, has_all and config.trainer.gradient_accumulation_steps == 1)
    check = partial(task.check_targets, classes=config.dataset.get("classes")) if parts.mode.needs_labels else None
    # Training data that a mode evaluates is transformed as the tests are.
    trains, strategy, trainer = not parts.mode.needs_run, parts.strategy, config.trainer
    train = data.train if trains else getattr(data.train, "evaluated", data.train)  # of a text: each token once
    sets = {"train": train, "test": data.test} | ({} if data.val is None else {"val": data.val})
    readers = {name: reader_of(config, one, name, trains and name == "train", check) for name, one in sets.items()}
    converter = build_model(config, world, parts, task, readers["train"])
    plan = partial(strategy.parts, micro_batches=trainer.gradient_accumulation_steps)
    own = {"converter": converter, "device": world.device, "parts": plan, "share": strategy.data_share(world)}
    shares = strategy.data_share_of(world.size)
    own["batch_size"] = check_batch_size(config, shares) if trains else trainer.batch_size
    loaders = {name: loader_of(config, one, name == "train" and trains, **own) for name, one in readers.items()}
    return assemble(config, parts, task, Loaders(split=split, **loaders), progress)


def build_model(config: RunConfig, world: World, parts: Parts, task: Task, reader: SampleReader) -> InputConverter:
    """Hand the model to the strategy. Returns what brings inputs to its type and layout. reader: of training data."""
    trainer, strategy, data = config.trainer, parts.strategy, config.dataset
    with seeded(config.seed):
        torch.set_default_dtype(torch.float32)  # a file of the user's may have set another: `trainer.precision` decides
        model = instantiate_as(nn.Module, config.model, "model")
        torch.set_default_dtype(torch.float32)  # a constructor, too
        layout = setup.model_memory_format(model, trainer.channels_last, world.device)
        device = torch.device("cpu") if strategy.cut_on_cpu and world.size > 1 else world.device
        setup.prepare_model(model, trainer, world, device, layout)
        converter = InputConverter(model_dtype(trainer.precision), layout, data.get("mean"), data.get("std"))
        # Samples of training, for the first weights, or for their shapes.
        wanted = model.samples_wanted if isinstance(model, WeightsFromData) else int(has_lazy_layers(model))
        if wanted:
            raw, _ = reader.read(request_of(range(min(wanted, len(reader)))))
            inputs = converter.to(device)(map_tensors(lambda tensor: tensor.to(device), raw))
            getattr(model, "set_weights_from", partial(give_shapes, model))(inputs)
            model.to(memory_format=layout)
    load_initial_weights(model, config.parameters.init, config.parameters.new_layers)
    freeze(model, config.parameters.freeze)
    can_sync, mode = "sync_bn=on" not in strategy.refused, config.sync_bn.mode
    if mode == "on" or (mode == "auto" and can_sync and strategy.data_share_of(world.size) > 1):
        convert_sync_batch_norm(model, world)
    elif world.size == 1 or can_sync:
        convert_sync_batch_norm(model, world, nn.SyncBatchNorm)  # torch's refuses tensors of a CPU
    setup.checkpoint_activations(model, trainer.checkpoint_activations)
    strategy.setup(model, task.outputs, world, parts.gradient_sync, trainer.precision)
    return converter.to(world.device)


def assemble(config: RunConfig, parts: Parts, task: Task, loaders: Loaders, progress: Progress) -> Run:
    """The optimizer on the strategy's model, and what takes a step. A collective."""
    strategy, trainer, world = parts.strategy, config.trainer, parts.strategy.world
    steps_per_epoch = -(-len(loaders.train) // loaders.train.batch_size)
    total_steps = min(trainer.epochs * steps_per_epoch, trainer.max_steps or trainer.epochs * steps_per_epoch)
    objective = objective_of(config, task)
    direction = "min" if objective is None else direction_of(config, task, objective)
    node = dict(config.optimizer)
    if "fused" in node and node["fused"] is None:
        node["fused"] = can_fuse(strategy.model)
    make = partial(instantiate_as, torch.optim.Optimizer, node, "optimizer")
    optimizer = build_optimizer(make, config.parameters, strategy.model, world, trains=not parts.mode.needs_run)
    hyperparameters = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    average = None if trainer.ema is None else instantiate_as(object, trainer.ema, "trainer.ema", strategy.model)
    options = {"steps_per_epoch": steps_per_epoch, "total_steps": total_steps, "direction": direction}
    kinds: Any = Schedule | LRScheduler
    made = instantiate_as(kinds, config.scheduler, "scheduler", optimizer, **options)
    schedule = made if isinstance(made, Schedule) else TorchSchedule(optimizer, 1, lambda _: made, "step")
    meter = Meter(task, world)
    scaler = torch.amp.GradScaler(world.device.type, enabled=trainer.precision == "fp16")
    shared: dict[str, Any] = {"strategy": strategy, "task": task, "optimizer": optimizer, "schedule": schedule}
    shared |= {"scaler": scaler, "meter": meter, "progress": progress, "average": average}
    # Ranks that compute the same samples draw for their own parts of the model.
    by_sample = not trainer.compile and strategy.data_share_of(world.size) == world.size
    own = {"draws": Draws(config.seed, world.device, by_sample, progress), "max_grad_norm": trainer.max_grad_norm}
    own |= {"skips": config.watch.nan == "skip", "ignores": not loaders.train.is_whole}
    step = instantiate_as(Step, config.step, "step", **shared, **own)
    nodes = [*config.callbacks, *([] if trainer.profiler is None else [trainer.profiler])]
    callbacks = [instantiate_as(Callback, node, f"callbacks[{place}]") for place, node in enumerate(nodes)]
    shared |= {"objective": objective, "direction": direction, "clock": Clock(time_limit(trainer.max_time))}
    shared |= {"callbacks": callbacks, "hyperparameters": hyperparameters}
    return Run(config=config, world=world, model=strategy.model, step=step, loaders=loaders, **shared)


def objective_of(config: RunConfig, task: Task) -> str | None:
    """What chooses the best weights, such as val/accuracy; None: the last ones are the result."""
    if config.monitor == "auto":
        return f"val/{task.monitor}" if config.holds_out else None
    return config.monitor


def direction_of(config: RunConfig, task: Task, objective: str) -> str:
    """Whether "min" or "max" of it is better. Raises ConfigError if no evaluation measures it."""
    node = config.evaluation.metrics.get(objective.partition("/")[2])
    if node is None:
        return task.mode(objective)
    is_higher_better = getattr(instantiate(node), "higher_is_better", None)
    if is_higher_better is None:
        what = f"monitor={objective}: {node['_target_']} does not say whether more of it is better"
        raise ConfigError(f"{what}; type monitor=val/loss, or name a class of its kind with higher_is_better = True")
    return "max" if is_higher_better else "min"


# What saves, evaluates and logs.


def data_fingerprint(dataset: Any) -> str:
    """A hash of a data set, and what it covers: "0123456789abcdef of all samples and targets". Another run, rank or
    resumed run shall see that its data is another one.

    In memory every bit counts, or of more than `LARGEST_TENSOR` bytes some rows. A data set may have it as its
    attribute `fingerprint`. Elsewhere the length counts, and the attributes `files` and `targets`: random transforms
    change the samples. The hash of a part is that of the whole.
    """
    whole = unwrapped(dataset)[0]
    weights, own, covers = of_each_sample(whole, "weights"), getattr(whole, "fingerprint", None), ""
    if isinstance(own, str):
        found = own
    elif isinstance(whole, Tensors):
        tensors, length, covers = [whole.inputs.detach(), whole.targets.detach()], len(whole), "all samples and targets"
        described = [(str(tensor.dtype), list(tensor.shape)) for tensor in tensors]
        if max(tensor.nbytes for tensor in tensors) > LARGEST_TENSOR:
            count = min(TENSOR_ROWS, length)
            rows = torch.arange(count) * length // count
            tensors = [tensor[rows.to(tensor.device)] for tensor in tensors]
            covers = f"{count} of {length} samples and targets"
        values = (tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
        found = f"{short_hash(described, *values)} of {covers}"
    else:
        named = {"files": getattr(whole, "files", None), "targets": of_each_sample(whole, "targets")}
        kept = {name: each for name, each in named.items() if isinstance(each, np.ndarray) and each.dtype.kind != "O"}
        bits = [(name, each.tobytes()) for name, each in kept.items()]
        found = f"{short_hash((len(whole), bits))} of {' and '.join(['the length', *kept])}"
    return found if weights is None else f"{found}, weights {short_hash(np.asarray(weights, np.float64).tobytes())}"


def snapshots(record: ConfigRecord, run: Run) -> Checkpointer:
    """What saves this run and resumes it. Raises ConfigError, on all ranks, if their training data differs."""
    config, loaders = run.config, run.loaders
    count, data = len(loaders.train), data_fingerprint(loaders.train.reader.dataset)
    require_same(run.world, {"the training data": f"{count} samples, {data}"}, SAME_DATA)
    identity = {key: value for key, value in record.shown.items() if key.startswith("model.")}
    identity |= {"optimizer": config.optimizer["_target_"], "seed": config.seed}
    identity |= {"training samples": count, "training data": data}
    if loaders.split is not None:
        identity["validation data"] = loaders.split
    mirror = instantiate(config.snapshot.mirror) if run.world.is_rank_zero else None
    return Checkpointer(run, identity, dict(record.shown), mirror)


def torchmetrics_of(run: Run) -> dict[str, Any]:
    if not (nodes := run.config.evaluation.metrics):
        return {}
    import torchmetrics

    kind: Any = torchmetrics.Metric
    made = {name: instantiate_as(kind, node, f"evaluation.metrics.{name}") for name, node in nodes.items()}
    return {name: metric.set_dtype(torch.float64).to(run.meter.device) for name, metric in made.items()}


def evaluators(run: Run, loggers: Loggers) -> tuple[list[Evaluator], Evaluator | None]:
    """(each time an evaluation is due, for the test). All ranks prepare what the keys of rank 0's loggers ask for."""
    config, loaders = run.config, run.loaders
    images = max((node.get("images") or 0 for node in config.logger.values()), default=0)
    measured, file = torchmetrics_of(run), Path(config.run_dir) / SAMPLES
    test = Evaluator(run, loaders.test, loggers, images, "test", measured, file)
    each = [Evaluator(run, loaders.val, loggers, images, "val", measured)] if loaders.val is not None else []
    each += [test] * (config.evaluation.test == "every")
    return each, None if config.evaluation.test == "never" else test


def loggers(run: Run) -> Loggers:
    """The loggers on rank 0, none on other ranks."""
    if not run.world.is_rank_zero:
        return Loggers([])
    members = [instantiate_as(Logger, node, f"logger.{name}") for name, node in run.config.logger.items()]
    return Loggers([RunRecord(), *members])


def run_info(record: ConfigRecord, snapshots: Checkpointer) -> RunInfo:
    """What loggers receive, with the keys of run.json; "start" has those of this start. A collective."""
    run, world, shown, loaders = snapshots.run, snapshots.world, record.shown, snapshots.run.loaders
    test, names = loaders.test.reader.dataset, class_names(loaders.train.reader.dataset)
    data = {key.replace(" ", "_"): value for key, value in snapshots.identity.items() if key.startswith("training ")}
    data |= {"test_samples": len(test), "test_data": data_fingerprint(test)}
    if loaders.val is not None:
        data |= {"validation_samples": len(loaders.val.reader), "validation_data": loaders.split}
        numbers = loaders.val.reader.indices
        if numbers is not None and len(numbers) <= LONGEST:
            data["validation_numbers"] = " ".join(map(str, numbers.tolist()))
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
    hosts = list(dict.fromkeys(world.all_gather_json(socket.gethostname())))
    facts = {key: getattr(record, key) for key in ("command", "overrides", "flags")}
    facts |= {key: shown[key] for key in ("tags", "notes", "seed")}
    facts |= {"sweep": os.environ.get(SWEEP), "config": dict(shown), "data": data}
    facts["options"] = {group: option for group, option in record.options.items() if not group.startswith("hydra/")}
    facts["environment"] = {"threads": torch.get_num_threads(), "device": device}
    facts["classes"] = names if len(names) <= LONGEST else []
    facts["start"] = {"world_size": world.size, "launcher": environment.read_rank_info().started_by, "hosts": hosts}
    facts["test"] = earlier_test(run, data["test_data"])
    return RunInfo(run, facts)


def earlier_test(run: Run, test_data: str) -> Any:
    """The test of an earlier start of this run, as `RunInfo.test`. None if there is none, if the run goes on from a
    step before it, or if the test data is other data now. A collective."""
    found = None
    if run.world.is_rank_zero:
        with suppress(ConfigError):  # nothing is recorded yet
            before = read_run(Path(run.config.run_dir))
            if before["data"].get("test_data") == test_data:
                found = before["test"]
    found = run.world.broadcast_json(found)
    return found if found and found["step"] <= run.progress.step else None
