"""Checks before any process starts, and the parts of a job that they build, once, for all ranks.

Functions import torch, and what needs it, inside: the fork server imports the same while this process does.
"""

import gc
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.config.check import default_of, word
from lockstep.config.nodes import check_nodes, instantiate, instantiate_as, locate, takes
from lockstep.config.schema import RunConfig
from lockstep.distributed.run_folder import check_run_folder
from lockstep.distributed.signals import set_run_folder
from lockstep.errors import ConfigError
from lockstep.launchers.base import CalledHere, Launcher
from lockstep.modes.base import Mode
from lockstep.text import show

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy
    from lockstep.strategies.gradient_sync import GradientSync

GROUPS = ("dataset", "model", "loader", "optimizer", "scheduler", "strategy", "gradient_sync", "task", "logger")


@dataclass(frozen=True)
class Parts:
    """What a command is made of. Ranks get it as it is."""

    launcher: Launcher
    mode: Mode
    strategy: "Strategy"
    gradient_sync: "GradientSync"


def preflight(config: RunConfig, starts: bool = True) -> Parts:
    """The parts of a job. Raises ConfigError for whatever can be known to fail.

    starts: False for a job of a sweep that starts later. Nothing is begun or written, and no data is prepared.
    """
    for group in ("launch", "mode"):
        check_nodes(group, getattr(config, group))
    launcher, mode = instantiate_as(Launcher, config.launch, "launch"), instantiate_as(Mode, config.mode, "mode")
    if not starts and not mode.trains:
        raise ConfigError(f"mode={mode.name} is no training, and a sweep trains; type the command without -m")
    if starts and not mode.starts_ranks:
        launcher.prepare("lockstep.launchers.rank_imports")
    parts = build_parts(config, CalledHere(launcher) if mode.starts_ranks else launcher, mode)
    if starts and not (mode.starts_ranks or launcher.runs_elsewhere):
        check_run_folder(config.run_dir)
        set_run_folder(config.run_dir)
        if launcher.starts_processes:
            from lockstep.data.build import prepare_first

            prepare_first(config)
    gc.freeze()  # what has been imported stays
    gc.enable()
    return parts


def build_parts(config: RunConfig, launcher: Launcher, mode: Mode) -> Parts:
    """The parts, checked against each other, this machine and what the config names. Nothing is started or written."""
    from lockstep.preflight_rules import check_options  # imports torch
    from lockstep.strategies.base import Strategy
    from lockstep.strategies.gradient_sync import GradientSync

    for group in GROUPS:
        check_nodes(group, vars(config.loader) if group == "loader" else getattr(config, group))
    check_loggers(config)
    check_optimizer(config)
    strategy = instantiate_as(Strategy, config.strategy, "strategy")
    gradient_sync = instantiate_as(GradientSync, config.gradient_sync, "gradient_sync")
    launcher.validate()
    check_options(config, launcher, mode, strategy, gradient_sync)
    return Parts(launcher, mode, strategy, gradient_sync)


# until issue 45
def check_loggers(config: RunConfig) -> None:
    """Raise ConfigError for a logger whose packages are not installed."""
    for name, node in config.logger.items():
        needed: Sequence[str] = getattr(locate(f"logger.{name}", node["_target_"]), "packages", ())
        missing = [package for package in needed if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(f"logger={name} needs {' and '.join(missing)}; type pip install {' '.join(missing)}")


def check_optimizer(config: RunConfig) -> None:
    """Raise ConfigError for hyperparameters that an optimizer of torch refuses: it is asked with one small weight."""
    import torch

    node, groups = config.optimizer, config.parameters.groups

    def refusal(changes: dict[str, Any]) -> str:
        try:
            instantiate(node | changes, [torch.nn.Parameter(torch.zeros(2, 2))])
        except Exception as error:
            return " ".join(str(error).split())
        return ""

    is_torchs = node["_target_"].startswith("torch.optim.")
    if is_torchs and (reason := refusal({})):
        defaults = {name: default_of(f"optimizer.{name}", node["_target_"]) for name in node if name != "_target_"}
        fitting = [word(f"optimizer.{name}", value) for name, value in defaults.items() if not refusal({name: value})]
        raise ConfigError(f"{node['_target_']} refuses its arguments ({reason}); type {[*fitting, 'optimizer=sgd'][0]}")
    target = locate("optimizer", node["_target_"])
    for group in groups:
        reason = refusal({name: value for name, value in group.items() if takes(target, name)}) if is_torchs else ""
        if reason or not group.get("match"):
            reason, example = reason or "it has no match, the names of parameters", "[{match:fc,lr:0.1}]"
            raise ConfigError(
                f"parameters.groups: {show(group)} is refused: {reason}; type parameters.groups={example}"
            )
