"""A config file that does not exist, or that is no text, as one sentence. No torch here."""

import shlex
import sys
import traceback
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.errors import MissingConfigException

from lockstep.config.schema import CONF
from lockstep.config.suggest import closest

SWEEPERS = {name: f"hydra-{name}-sweeper" for name in ("optuna", "ax", "nevergrad")}  # plugins of Hydra


def missing_option(error: MissingConfigException, arguments: list[str]) -> str:
    """The sentence for an option that its group does not have, or for the config that a run would begin with."""
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    if group == "hydra/sweeper" and option in SWEEPERS:
        instead = ", or sweep.search=tpe sweep.trials=20 without it"
        return f"{group}={option} needs a plugin of Hydra; type pip install {SWEEPERS[option]}{instead}"
    options = sorted(error.options or [path.stem for path in (CONF / group).glob("*.yaml")])
    if not group or not options:
        return _missing_config(str(error.missing_cfg_file), arguments)
    meant = closest(option, options)
    instead = f"{group}={meant}" if meant else f"one of {' '.join(f'{group}={name}' for name in options)}"
    return f"{group}={option} is no option; type {instead}"


def _missing_config(name: str, arguments: list[str]) -> str:
    flags = get_args_parser().parse_args(arguments)
    chosen = (flags.config_name or "config").removesuffix(".yaml")
    if name.removesuffix(".yaml") != chosen:  # named in a defaults list
        return f"there is no config {name}; type --config-dir=<folder> to add a folder of configs"
    folder = flags.config_dir and Path(flags.config_dir)
    if flags.config_path is not None:  # Hydra looks for it beside the script
        folder = (Path(sys.argv[0]).parent / flags.config_path.removeprefix("file://")).resolve()
    if flags.config_path is not None and flags.config_name is None:
        typed = shlex.quote(f"--config-dir={folder}")
        return f"--config-path={flags.config_path} has no config.yaml; type {typed} to add the folder to conf/"
    names = sorted(file.stem for file in folder.glob("*.yaml")) if folder else []
    if not names:
        return f"there is no config {name}; type --config-dir=<the folder of {chosen}.yaml>"
    meant = names[0] if len(names) == 1 else closest(chosen, names)
    instead = f"--config-name={meant}" if meant else f"one of {' '.join(f'--config-name={name}' for name in names)}"
    return f"--config-name={name} is no config in {folder}; type {instead}"


def unreadable_text(error: UnicodeDecodeError) -> str | None:
    """The sentence for a config file that is not UTF-8. None if Hydra was not reading a file."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = frame.f_locals.get("full_path")
        if path is not None and "/hydra/" in frame.f_code.co_filename.replace("\\", "/"):
            return f"{path} is no text in UTF-8 ({error.reason}); type it again in an editor that saves UTF-8"
    return None
