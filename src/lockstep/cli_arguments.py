"""The words typed after `src/train.py`, before Hydra reads them."""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser

from lockstep.cli_errors import compose_typed, typed_value
from lockstep.config.check import NEEDED_GROUPS
from lockstep.config.schema import SECTIONS, find_rule
from lockstep.config.suggest import closest, removed_key
from lockstep.config.targets import refuse_foreign_record
from lockstep.distributed.environment import RankInfo
from lockstep.errors import ConfigError, without_quotes

HELP_FLAGS = {"--help", "-h"}
TEXT_FLAGS = {*HELP_FLAGS, "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
MULTIRUN_FLAGS = {"--multirun", "-m"}
FLAGS_WITH_VALUE = {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"}
FLAGS_WITH_VALUE |= {"--config-dir", "-cd", "--experimental-rerun"}
GROUPS_OF_ONE = (*NEEDED_GROUPS, "backend", "sync_bn")
SWITCHES = {"true": "on", "false": "off"}
OPTUNA = "optuna"
MODES = ("run", "multirun", "cfg", "info", "shell_completion")  # of Hydra, which does one of them
OWN_SWEEPERS = ("lockstep", "basic")  # they draw nothing at random


def prepare_arguments(argv: list[str]) -> list[str]:
    """The command as Hydra reads it: overrides first, then flags, without what torch's old launcher adds.

    `+experiment=x` becomes `experiment=x`. Raises ConfigError for --experimental-rerun, for unknown flags, and for a
    run's record as a config folder if it contains what can run commands.
    """
    words = [word for word in argv[1:] if not word.startswith(("--local-rank=", "--local_rank="))]
    if any(word.partition("=")[0] == "--experimental-rerun" for word in words):
        raise ConfigError(
            "--experimental-rerun needs a pickled config, which these runs do not write; "
            "type hydra.run.dir=<the run's folder> and the overrides in its .hydra/overrides.yaml"
        )
    overrides, flags = _split(words)
    parsed = _parse_flags(flags)
    _check_package(parsed)
    _check_config_folders(parsed, Path(argv[0]).parent)
    _check_search_path(typed_value("hydra.searchpath", overrides))
    for word in overrides:
        if not word.partition("=")[0].strip("+~"):
            raise ConfigError(f"{word} has no key; type <key>=<value>")
        _check_group_override(*word.partition("=")[::2])
    return [argv[0], *(re.sub(r"^\+{1,2}experiment=", "experiment=", word) for word in overrides), *flags]


def resume_sweep(argv: list[str]) -> list[str]:
    """The command with the words of the sweep that `sweep.resume=` names before what is typed, which wins.

    Raises ConfigError for a folder that is not the folder of a sweep.
    """
    typed = typed_value("sweep.resume", argv[1:])
    if typed is None or typed == "null":
        return argv
    if not MULTIRUN_FLAGS & set(argv[1:]):
        raise ConfigError(f"sweep.resume={typed} goes on with a sweep; type -m sweep.resume={typed}")
    from lockstep.sweeps.table import recorded_arguments

    overrides, flags = _split([word for word in argv[1:] if not word.startswith("hydra.sweep.dir=")])
    keys = {word.partition("=")[0].lstrip("+") for word in overrides}
    before, flags_before = _split(recorded_arguments(Path(without_quotes(typed))))
    kept = [word for word in before if word.partition("=")[0].lstrip("+") not in keys]
    kept_flags = [word for word in flags_before if word not in MULTIRUN_FLAGS]
    return [argv[0], *kept, *overrides, f"hydra.sweep.dir={typed}", *kept_flags, *flags]


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """(overrides, flags). argparse refuses overrides on both sides of a flag such as `-m`."""
    overrides: list[str] = []
    flags: list[str] = []
    takes_value = False
    for word in words:
        if takes_value or word.startswith("-"):
            flags.append(word)
        elif flags and flags[-1] in ("--info", "-i") and not re.search(r"[=~]", word):
            flags.append(word)  # --info may have a value
        else:
            overrides.append(word)
        takes_value = not takes_value and word in FLAGS_WITH_VALUE
    return overrides, flags


def _parse_flags(flags: list[str]) -> Namespace:
    """Hydra's flags. Raises ConfigError for those that it does not take, where argparse would print its usage."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; type python src/train.py --hydra-help to see the flags")

    parser = get_args_parser()
    setattr(parser, "error", refuse)  # noqa: B010  (mypy refuses the assignment)
    parsed = parser.parse_args(flags)
    first, *others = [f"--{mode.replace('_', '-')}" for mode in MODES if getattr(parsed, mode)] or [""]
    if others:
        raise ConfigError(f"{first} and {' and '.join(others)} exclude each other; type the command with one of them")
    return parsed


def _check_config_folders(flags: Namespace, script_folder: Path) -> None:
    """Raise ConfigError for a folder that does not exist, and as `refuse_foreign_record` does.

    Hydra reads --config-path from the folder of src/train.py.
    """
    for name, base, typed in (("dir", Path(), flags.config_dir), ("path", script_folder, flags.config_path)):
        if typed is not None and not typed.startswith("pkg://"):
            folder = base / typed.removeprefix("file://")
            if not folder.is_dir():
                raise ConfigError(f"--config-{name}={typed} is no folder; type --config-{name}=<a folder of configs>")
            refuse_foreign_record(folder, flags.config_name or "config")


def _check_search_path(typed: str | None) -> None:
    """Raise ConfigError for a folder that does not exist, which Hydra would leave out with a warning."""
    for item in (typed or "").strip("'\"[]").split(","):
        folder = item.strip(" '\"").removeprefix("file://")
        if folder not in ("", "null") and "://" not in folder and "${" not in folder and not Path(folder).is_dir():
            raise ConfigError(f"{folder} in hydra.searchpath is no folder; type --config-dir=<a folder of configs>")


def _check_package(flags: Namespace) -> None:
    """Raise ConfigError for --package where Hydra would ignore it, or find nothing."""
    package = flags.package
    if package is None:
        return
    if not flags.cfg:
        raise ConfigError(f"--package={package} is a part of what --cfg prints; type --cfg job --package={package}")
    if find_rule(package) is not None:
        raise ConfigError(f"--package={package} is a value, and no section; type --cfg {flags.cfg} to see it")
    sections = {*SECTIONS, *GROUPS_OF_ONE, "logger", "hydra"}
    first = package.partition(".")[0]
    meant = None if first in sections else closest(first, sections)
    if meant is not None:
        raise ConfigError(f"--package={package} is no section; type --cfg {flags.cfg} --package={meant}")


def _check_group_override(group: str, option: str) -> None:
    """Raise ConfigError for a value of a config group that Hydra does not take for the name of one option."""
    if option.lower() == "null" and group in ("experiment", "logger"):
        instead = "logger=[]" if group == "logger" else "the command without experiment=null"
        raise ConfigError(f"{group}=null is no option; type {instead}")
    plain = group.lstrip("+")
    if group != plain and option and (plain in GROUPS_OF_ONE or group == "++logger"):
        instead = f"+logger={option}" if plain == "logger" else f"{plain}={option}"
        raise ConfigError(f"{plain} is a config group, which {group} cannot add; type {instead}")
    if group not in GROUPS_OF_ONE:
        return
    several = re.fullmatch(r"\[(.*,.*)\]", option)
    if several:
        names = several[1].replace(" ", "")
        raise ConfigError(
            f"{group}={option} chooses several options, and a run has one; "
            f"type {group}={names.partition(',')[0]}, or for a sweep -m {group}={names}"
        )
    word = option.lower()
    if group == "sync_bn" and word in SWITCHES:
        raise ConfigError(f"sync_bn={option} is no option; type sync_bn={SWITCHES[word]}")
    if word == "null":
        raise ConfigError(removed_key(group, []))
    if word in SWITCHES or re.fullmatch(r"-?[\d.]+", word):
        raise ConfigError(f"{group}={option} is no option; type {group}=<an option in conf/{group}>")


def asks_for_text(argv: list[str]) -> bool:
    """Whether the command only prints something, such as --help."""
    return any(word.partition("=")[0] in TEXT_FLAGS for word in argv[1:])


def refuse_foreign_launcher(name: str | None) -> None:
    """Raise ConfigError for a launcher of Hydra's, such as joblib. name: of the launcher that was chosen, if any."""
    if name not in (None, "lockstep"):
        raise ConfigError(
            f"hydra/launcher={name} cannot run these jobs; leave it out, and for several jobs at once type "
            f"sweep.slots=2, or for jobs on a cluster launch=slurm"
        )


def refuse_sampling_sweep(argv: list[str], info: RankInfo) -> list[str]:
    """Check a sweep's sweeper and launcher. Returns the command, for Optuna with the direction of the objective.

    Raises ConfigError for another launcher of Hydra's than this project's, and for a sweeper that draws values at
    random inside a world of several ranks: every rank would draw its own.
    """
    refuse_foreign_launcher(typed_value("hydra/launcher", argv[1:]))
    if not MULTIRUN_FLAGS & set(argv[1:]):
        return argv
    sweeper = typed_value("hydra/sweeper", argv[1:]) or OWN_SWEEPERS[0]
    if sweeper not in OWN_SWEEPERS and info.world_size > 1:
        raise ConfigError(
            f"hydra/sweeper={sweeper} would draw other values on every rank; "
            f"type python src/train.py -m launch=torchrun hydra/sweeper={sweeper} ..."
        )
    if sweeper != OPTUNA or typed_value("hydra.sweeper.direction", argv[1:]) is not None:
        return argv
    direction = _direction(argv[1:])
    return [argv[0], *direction, *argv[1:]]


def _direction(arguments: list[str]) -> list[str]:
    """`hydra.sweeper.direction=` of the objective. Empty if the config already asks for another than the default."""
    cfg: Any = compose_typed(arguments)
    if cfg is None:
        return []
    direction = cfg.hydra.sweeper.get("direction", "minimize")
    if getattr(direction, "name", direction) != "minimize":  # Optuna's plugin has an Enum
        return []
    mode = cfg.task.metrics.get(cfg.objective.removeprefix("test/"))
    names = {"min": "minimize", "max": "maximize"}
    return [f"hydra.sweeper.direction={names[mode]}"] if mode in names else []
