"""Keys and options of the first version, and what they are called now."""

RENAMED: dict[str, str] = {
    "trainer.accumulate": "trainer.gradient_accumulation_steps",
    "trainer.clip_norm": "trainer.max_grad_norm",
    "trainer.shards": "strategy.count",
    "trainer.eval_batch_size": "evaluation.batch_size",
    "trainer.eval_every": "evaluation.every",
    "trainer.patience": "evaluation.patience",
    "trainer.log_every": "logging.every",
    "trainer.save_every": "snapshot.every",
    "trainer.keep": "snapshot.keep_last",
    "trainer.profile": "profiler.enabled",
    "timeline.every": "profiler.every",
    "timeline.trace_after": "profiler.trace_after",
    "timeline.trace_steps": "profiler.trace_steps",
    "loop.meet_every": "strategy.sync_every",
    "gradient_sync.every": "gradient_sync.sync_every",
    "gradient_sync.after": "gradient_sync.start_step",
    "scheduler.warmup": "scheduler.warmup_epochs",
    "scheduler.final": "scheduler.final_lr_ratio",
    "scheduler.every": "scheduler.step_epochs",
    "dataset.loss": "task",
    "dataset.judged_by": "task.monitor",
}
RENAMED_OPTIONS: dict[str, str] = {
    "strategy=dp": "strategy=data_parallel",
    "strategy=shards": "strategy=virtual_ranks",
}
# Where more than the name changed. {value}: what was typed.
_OVERRIDES = {
    "trainer.shards": "strategy=virtual_ranks strategy.count={value}",
    "dataset.loss": "task=classification or task=regression",
    "gradient_sync.every": "gradient_sync=local_sgd gradient_sync.sync_every={value}",
    "gradient_sync.after": "gradient_sync=powersgd gradient_sync.start_step={value}",
    "scheduler.every": "scheduler=step scheduler.step_epochs={value}",
    "loop.meet_every": "strategy=async_parameter_server strategy.sync_every={value}",
}
_SWITCHES = {"on": "true", "off": "false"}


def renamed_key(key: str, value: str | None) -> str | None:
    """The sentence for a key of the first version, None for other keys. value: as typed; None if unknown."""
    if key not in RENAMED:
        return None
    if key == "trainer.profile" and value is not None:
        value = _SWITCHES.get(value.lower(), value)
    typed = "<value>" if value is None else value
    new = _OVERRIDES.get(key, f"{RENAMED[key]}={{value}}").replace("{value}", typed)
    return f"{key} is now {RENAMED[key]}; type {new}"


def renamed_option(group: str, option: str) -> str | None:
    """The sentence for an option of the first version, None for other options."""
    if group == "loop":
        new = "strategy=async_parameter_server" if option == "asynchronous" else "strategy=ddp"
        return f"loop={option} is gone, because the strategy decides how the ranks train; type {new}"
    renamed = RENAMED_OPTIONS.get(f"{group}={option}")
    return f"{group}={option} is now {renamed}; type {renamed}" if renamed else None
