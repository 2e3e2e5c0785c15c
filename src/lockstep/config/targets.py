"""Which classes and functions a config may name, so that a config from a stranger cannot run what it likes.

1. What the user has typed is allowed, whatever it is.
2. So are the parts of this project, torch and torchvision that configs are made of: OPEN.
3. A config folder of the user's own may name anything but the standard library.
4. The record of a run, `.hydra`, may be a stranger's: it may name what 1 and 2 allow, and no more.

No torch here: this runs before anything is imported that a config names. docs/security.md has the limits.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.conf import HydraConf
from omegaconf import DictConfig

from lockstep.config.check import Node, as_dict, join, nodes_with_target
from lockstep.errors import ConfigError

OPEN = (
    *(f"lockstep.{name}." for name in ("models", "data", "tasks", "strategies", "loggers", "launchers", "modes")),
    "lockstep.training.optimizers.",
    "lockstep.training.schedulers.",
    *("torch.nn.", "torch.optim.", "torch.utils.data."),
    *(f"torchvision.{name}." for name in ("datasets", "models", "ops", "transforms")),
)
BUILT_IN = ("torch", "torch._C._nn")  # where torch's functions in C say that they are from
TARGET = r"_target_[\"']?:\s*[\"']?([\w.]+(?:\$\{[^}]*\}|[\w.])*)"  # as written in YAML, on a line or in braces
RECORD = ".hydra"
RECORD_FILES = ("hydra.yaml", "overrides.yaml")


class ForeignName(ValueError):
    """A dotted name that leads out of its package: torch.os.system is os.system, and no part of torch."""


def check_targets(cfg: DictConfig | Node, hydra_cfg: HydraConf) -> None:
    """Raise ConfigError for a `_target_` that is not allowed. hydra_cfg: the words typed, and the config folders."""
    typed = set(re.findall(r"[\w.]+", " ".join(hydra_cfg.overrides.task)))
    folders = [Path(source.path) for source in hydra_cfg.runtime.config_sources if source.schema == "file"]
    for key, node in nodes_with_target(as_dict(cfg)):
        name = node["_target_"]
        if name not in typed and not is_open(name) and not _named_in(folders, name):
            where = join(key, "_target_")
            raise ConfigError(
                f"{where}={name} may run anything, and neither the command line nor a config folder of your own names "
                f"it; if you trust it, type {where}={name}"
            )


def is_open(name: str) -> bool:
    """Whether any config may name it: it is public, and in one of the packages of OPEN."""
    return name.startswith(OPEN) and not any(part.startswith("_") for part in name.split("."))


def names_own_code(cfg: DictConfig) -> bool:
    """Whether the config names a class or function of the user's."""
    return not all(is_open(node["_target_"]) for _, node in nodes_with_target(as_dict(cfg)))


def chooses_foreign_target(word: str) -> bool:
    """Whether an override names a `_target_` that only its user may choose, and no record of a run."""
    return "_target_" in word and not all(map(is_open, re.findall(r"_target_['\"]?\s*[=:]\s*([^,}\s]*)", word)))


def require_own_name(name: str, place: str, found: object) -> None:
    """Raise ForeignName if `found`, which is at the `place` on the way to `name`, is not from the package of `name`."""
    if not callable(found) and not isinstance(found, ModuleType):
        return
    module = _module_of(found)
    home, starts_in = module.partition(".")[0], name.partition(".")[0]
    is_foreign = home in sys.stdlib_module_names and starts_in not in sys.stdlib_module_names
    if is_open(name) and isinstance(found, ModuleType):
        is_foreign = module != place
    elif is_open(name):
        is_foreign = not f"{module}.".startswith(OPEN) and not (inspect.isbuiltin(found) and module in BUILT_IN)
    if is_foreign:
        raise ForeignName(f"{place} belongs to {module}")


def refuse_foreign_record(folder: Path, config_name: str) -> None:
    """Raise ConfigError for a run's record as a config folder, if it contains more than the config of a run.

    A node `hydra` and a defaults list tell Hydra what to run before this project sees the config.
    """
    if not _is_record(folder):
        return
    if config_name.rpartition("/")[2].startswith("hydra"):
        raise ConfigError(f"{folder}/{config_name} sets up Hydra itself; type --config-name=config")
    for path in sorted(folder.rglob("*.yaml")):
        found = [] if path.name.startswith(("hydra.", "overrides.")) else _what_runs(path.read_text(errors="replace"))
        if found:
            raise ConfigError(
                f"{path} is in the record of a run and contains {found[0]}, which can run commands; remove it there if "
                f"you trust the rest, or type the overrides that stand in overrides.yaml"
            )


def _what_runs(text: str) -> list[str]:
    """What Hydra or launch=slurm would run of a config with this text."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:  # Hydra says where the error is
        return []
    config = config if isinstance(config, dict) else {}
    launch = config.get("launch")
    options = launch if isinstance(launch, dict) else {}
    found = [key for key in ("hydra", "defaults") if key in config] + ["@package"] * ("@package" in text)
    return found + [f"launch.{key}" for key in ("setup", "options") if options.get(key)]


def _named_in(folders: Sequence[Path], name: str) -> bool:
    if name.partition(".")[0] in sys.stdlib_module_names:
        return False
    return any(
        re.fullmatch(pattern, name) for folder in folders if not _is_record(folder) for pattern in _names(folder)
    )


def _names(folder: Path) -> Iterator[str]:
    """A pattern for every `_target_` in the files of `folder`. An interpolation stands for any name."""
    for path in folder.rglob("*.yaml"):
        if RECORD not in path.relative_to(folder).parts:
            for written in re.findall(TARGET, path.read_text(errors="replace")):
                yield r"\w+(\.\w+)*".join(map(re.escape, re.split(r"\$\{[^}]*\}", written)))


def _is_record(folder: Path) -> bool:
    """Whether this is a run's folder, or the record in it, perhaps under another name."""
    holds_record = (folder / RECORD).exists() or all((folder / name).exists() for name in RECORD_FILES)
    return RECORD in folder.resolve().parts or holds_record


def _module_of(found: Any) -> str:
    """The name of the module that defines `found`."""
    if isinstance(found, partial):
        return _module_of(found.func)
    if isinstance(found, ModuleType):
        return found.__name__
    return str(getattr(found, "__module__", None) or type(found).__module__)
