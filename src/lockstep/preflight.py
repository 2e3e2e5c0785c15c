"""What can be known to fail before a process is started, said in a sentence that ends in what to type."""

from lockstep.refusal import Refusal

WHOLE = (lambda value: type(value) is int and value >= 1, "a whole number of 1 or more")
MAYBE_WHOLE = (lambda value: value is None or WHOLE[0](value), "a whole number of 1 or more, or null")
SWITCH = (lambda value: type(value) is bool, "true or false")


def _above_zero(value):
    return type(value) in (int, float) and value > 0


TRAINER = {
    "epochs": (*WHOLE, 5),
    "max_steps": (*MAYBE_WHOLE, 100),
    "batch_size": (*WHOLE, 128),
    "batch_size_per_rank": (*MAYBE_WHOLE, 64),
    "eval_batch_size": (*WHOLE, 128),
    "accumulate": (*WHOLE, 2),
    "shards": (*MAYBE_WHOLE, 4),
    "clip_norm": (lambda value: value is None or _above_zero(value), "a number above 0, or null", 1.0),
    "precision": (lambda value: value in ("fp32", "bf16", "fp16", "fp64"), "fp32, bf16, fp16 or fp64", "fp32"),
    "compile": (
        lambda value: type(value) is bool or value in ("reduce-overhead", "max-autotune"),
        "true, false, reduce-overhead or max-autotune",
        "false",
    ),
    "channels_last": (lambda value: value == "auto" or type(value) is bool, "auto, true or false", "auto"),
    "deterministic": (*SWITCH, "true"),
    "eval_every": (*WHOLE, 1),
    "patience": (*MAYBE_WHOLE, 3),
    "ema": (lambda value: value is None or (type(value) is float and 0 < value < 1), "a number between 0 and 1, or null", 0.999),
    "log_every": (*WHOLE, 10),
    "profile": (lambda value: type(value) is bool or value in ("on", "off"), "on or off", "on"),
    "save_every": (lambda value: isinstance(value, str), "epochs, steps or minutes", "1epochs"),
    "keep": (*WHOLE, 3),
}


TIMELINE = {"every": (*WHOLE, 101), "trace_after": (*WHOLE, 10), "trace_steps": (*WHOLE, 3)}


def trainer(values):
    """Refuse trainer values of the wrong kind."""
    _each("trainer", values, TRAINER)


def timeline(values):
    """Refuse numbers of steps that trainer.profile=on could not go by."""
    _each("timeline", values, TIMELINE)


def _each(group, values, wishes):
    for key, (fits, wish, example) in wishes.items():
        if not fits(values[key]):
            raise Refusal(f"{group}.{key}={values[key]} wants {wish}; try {group}.{key}={example}")


def on(switch):
    """Whether a switch is on: a bare `on` is a truth value in YAML and a word on the command line."""
    return switch in (True, "on")


def numbers(group, values):
    """Refuse words where an optimizer's, a scheduler's or a model's options want numbers."""
    for key, value in values.items():
        if isinstance(value, str) and key not in ("_target_", "name"):
            raise Refusal(f"{group}.{key}={value} wants a number; type {group}.{key}=<number>, as in conf/{group}/")


def objective(name, measured):
    """Refuse an objective that no evaluation will measure."""
    if name not in [f"test/{measure}" for measure in measured]:
        raise Refusal(f"objective={name} is not measured; type objective={' or objective='.join(f'test/{measure}' for measure in measured)}")


def strategy(name, options, size, trainer, sync_bn, optimizer):
    """Refuse what a strategy cannot do, or would do wrong without a word. size: the number of ranks."""
    name, synced = name.rpartition(".")[2], sync_bn.endswith(".on")
    wrong = {
        "dp": [
            (size > 1, f"is one process that feeds several devices, and {size} were asked for; type strategy=ddp, or start one process"),
            (not _above_zero(options.get("first_share")), "wants a first_share above 0; try strategy.first_share=0.5"),
            (synced, "normalises each device's part by itself; type sync_bn=off, or strategy=ddp"),
            (trainer["compile"], "copies the net for every batch, a compiled one with the wrong weights; type trainer.compile=false"),
        ],
        "fsdp": [
            (optimizer.get("fused") and optimizer["_target_"].endswith(".SGD"), "has no fused SGD in torch; type optimizer.fused=false"),
        ],
        "model_parallel": [
            (not WHOLE[0](options.get("devices")), "wants a whole number of devices a rank; try strategy.devices=2"),
        ],
        "pipeline": [
            (options.get("schedule") not in ("1F1B", "GPipe"), "knows two schedules; type strategy.schedule=1F1B or strategy.schedule=GPipe"),
            (not WHOLE[0](options.get("micro_batches")), "wants a whole number of micro-batches; try strategy.micro_batches=4"),
            (synced, "has each layer on one rank, with nobody to share statistics with; type sync_bn=off"),
            (trainer["precision"] == "fp16", "cannot scale a loss that only the last rank knows; type trainer.precision=bf16"),
            (trainer["compile"], "runs the net's layers, not the compiled net; type trainer.compile=false"),
            (on(trainer["profile"]), "runs forward and backward passes by turns, a step has no such parts; type trainer.profile=off"),
        ],
        "async_parameter_server": [
            (size < 2, "has no worker in a world of 1; type launch=spawn launch.nproc_per_node=3"),
            (synced, "lets ranks run apart and sync_bn=on wants them in one batch; type sync_bn=off"),
            (trainer["deterministic"], "applies gradients in the order they come; type trainer.deterministic=false"),
            (trainer["precision"] == "fp16", "would scale each worker's fp16 loss differently; type trainer.precision=bf16"),
            (on(trainer["profile"]), "lets ranks run apart, which has no step to measure; type trainer.profile=off"),
            ("step" in trainer["save_every"], "saves where its ranks meet and not at any step; type trainer.save_every=1epochs or 10min"),
        ],
    }
    for is_wrong, sentence in wrong.get(name, []):
        if is_wrong:
            raise Refusal(f"strategy={name} {sentence}")


def gradient_sync(option, strategy, precision):
    """Refuse a communication hook without DDP to call it, and what ranks that train apart cannot share."""
    option = option.rpartition(".")[2]
    if option not in ("auto", "all_reduce") and not strategy.endswith(".ddp"):
        raise Refusal(f"gradient_sync={option} is a hook in DDP; type strategy=ddp gradient_sync={option}, or gradient_sync=auto")
    if option == "local_sgd" and precision == "fp16":
        raise Refusal("gradient_sync=local_sgd would scale each rank's fp16 loss differently; type trainer.precision=bf16")


def loop(name, strategy):
    """Refuse the asynchronous server's loop without its strategy, or the reverse."""
    if strategy.endswith(".async_parameter_server") != name.endswith(".async_parameter_server.train"):
        raise Refusal("loop=asynchronous is strategy=async_parameter_server's; type that strategy, or leave loop= out")


def shards(count, strategy, accumulate, sync_bn):
    """Refuse trainer.shards without its strategy, or the reverse, and what would undo it."""
    chosen = strategy.endswith(".shards")
    if bool(count) != chosen:
        raise Refusal("trainer.shards and strategy=shards go together; type strategy=shards trainer.shards=4, or neither")
    if chosen and (accumulate > 1 or sync_bn.endswith(".on")):
        raise Refusal("strategy=shards keeps statistics per shard and already computes a step in parts; type trainer.accumulate=1 sync_bn=off")
