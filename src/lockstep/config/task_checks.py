"""What the keys of a task must have in common with each other and with the data set. No torch."""

from typing import Any

from lockstep.config.fields import show
from lockstep.config.options import TARGETS
from lockstep.errors import ConfigError

LANGUAGE_MODELLING = "lockstep.tasks.language_modelling.LanguageModelling"
OF_LANGUAGE_MODELLING = ("loss", "perplexity")


def check_task(config: dict[str, Any]) -> None:
    """Raise ConfigError for keys that do not go together."""
    task = config.get("task") or {}
    if task.get("_target_") not in TARGETS:
        return
    if "loss" not in task.get("metrics", {}):
        raise ConfigError("task.metrics has no loss, which every run reports; type ++task.metrics.loss=min")
    _check_metrics(task)
    _check_own_parts(task)
    classes, known = task.get("classes"), config["dataset"].get("classes")
    if None not in (classes, known) and classes < known:
        raise ConfigError(f"task.classes={classes} is less than dataset.classes={known}; type task.classes={known}")


def _check_metrics(task: dict[str, Any]) -> None:
    for name, mode in task.get("metrics", {}).items():
        key = f"task.metrics.{name}"
        if mode not in ("min", "max"):
            raise ConfigError(f"{key}={show(mode)} wants min or max; type {key}=min or {key}=max")
        if task["_target_"] == LANGUAGE_MODELLING and name not in OF_LANGUAGE_MODELLING:
            known = " and ".join(OF_LANGUAGE_MODELLING)
            raise ConfigError(f"{key} is not measured by this task, which has {known}; type ~{key}")


def _check_own_parts(task: dict[str, Any]) -> None:
    """A key that would change nothing is refused."""
    smoothing = task.get("label_smoothing")
    if task.get("loss") and smoothing:
        raise ConfigError(
            f"task.label_smoothing={smoothing} is of the task's own loss, which task.loss replaces; "
            f"type task.label_smoothing=0, and ++task.loss.label_smoothing={smoothing} if your loss takes it"
        )
    for name in task.get("measures") or {}:
        if name not in task["metrics"]:
            raise ConfigError(
                f"task.measures.{name} is not in task.metrics, which says whether more is better; "
                f"type +task.metrics.{name}=max or +task.metrics.{name}=min"
            )
