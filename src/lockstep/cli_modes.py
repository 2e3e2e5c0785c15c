"""The command of a trained run as the base of mode=evaluate and its like. No torch here."""

import json
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lockstep.cli_arguments import MULTIRUN_FLAGS, asks_for_text
from lockstep.cli_errors import typed_value
from lockstep.cli_record import words_of_folders
from lockstep.config.targets import RECORD, chooses_foreign_target
from lockstep.errors import ConfigError, path_value, without_quotes
from lockstep.runs.record import FINISHED, read_run, state_of

TRAIN, CHECK, DRY = "train", "check", "dry"
# Where and how a run computed, and what it wrote: another command says that itself. The numbers do not depend on it.
NOT_TAKEN: tuple[str, ...] = ("resume", "mode", "launch", "logger", "sweep", "hydra", "run_dir")
NOT_TAKEN += ("backend", "strategy", "gradient_sync", "sync_bn", "profiler", "snapshot", "trainer.compile")
NOT_TAKEN += ("trainer.digest", "watch.nan")  # they are refused with some strategies
NORMALISATION = ("mean", "std")
# What a finished run may be trained on without: it ended the run, or changes no number.
NOT_NEEDED: tuple[str, ...] = ("trainer.max_steps", "trainer.pause_after", "trainer.digest", "evaluation.patience")
NOT_NEEDED += ("logging", "watch", "backend", "data_dir")


def require_words_of_finished_run(argv: list[str]) -> list[str]:
    """The command. Raises ConfigError if it would train a finished run on with another config than it was made with.

    That is the folder of such a run typed again, with overrides left out: the defaults would replace them.
    """
    typed = argv[1:]
    folder = Path(without_quotes(typed_value("hydra.run.dir", typed) or ""))
    if MULTIRUN_FLAGS & set(typed) or typed_value("mode", typed) not in (None, TRAIN) or not _is_finished(folder):
        return argv
    left_out = _recorded_words(folder, typed)
    words = shlex.join(word for word in left_out if not _belongs_to(word, NOT_NEEDED))
    if words:
        raise ConfigError(
            f"{folder} is a finished run of {words}; to train it on type {words} in this command, too, or "
            f"hydra.run.dir=<a new folder> for another run"
        )
    return argv


def _is_finished(folder: Path) -> bool:
    """Whether `folder` is that of a run that has finished, by its run.json."""
    with suppress(ConfigError):
        return state_of(read_run(folder)) == FINISHED
    return False


def with_trained_run(argv: list[str]) -> list[str]:
    """The command with the overrides of the run that `resume=` names before what is typed, which wins.

    Unchanged for mode=train. The log of the command goes to a folder of the mode inside the run folder, so that no new
    run folder is made; mode=check and launch=dry get one that is removed. Raises ConfigError for a run without a
    record, and for what only its user may type.
    """
    typed = argv[1:]
    mode, resume = typed_value("mode", typed) or TRAIN, typed_value("resume", typed)
    plans = mode == TRAIN and typed_value("launch", typed) == DRY
    if not plans and (mode == TRAIN or (mode != CHECK and resume in (None, "null"))):
        return argv
    if MULTIRUN_FLAGS & set(typed):
        what = f"launch={DRY}" if plans else f"mode={mode}"
        raise ConfigError(f"{what} is no training, and a sweep trains; type the command without -m, run by run")
    if plans or mode == CHECK:
        return argv if asks_for_text(argv) else [*argv, f"hydra.run.dir={path_value(_folder_to_remove())}"]
    folder = run_folder(without_quotes(str(resume)))
    _require_flags(folder, typed)
    words = _recorded_words(folder, typed)
    _require_open_targets(folder, words)
    if typed_value("dataset", typed) is not None:  # the net was trained on values that are normalised so
        words += [f"++{key}={value}" for key, value in _normalisation(folder) if typed_value(key, typed) is None]
    if typed_value("hydra.run.dir", typed) is None:
        words.append(f"hydra.run.dir={path_value(folder / str(mode))}")
    return [argv[0], *words, *typed]


def _folder_to_remove() -> Path:
    """Hydra makes a run folder before a config is checked. `cli.run_main` removes this one."""
    from multiprocessing.util import get_temp_dir

    return Path(get_temp_dir()) / CHECK


def run_folder(resume: str) -> Path:
    """The run folder of `resume`: a run folder, its snapshots/, or a file in one of them. Raises ConfigError."""
    path = Path(resume)
    for folder in (path, path.parent, path.parent.parent):
        if (folder / RECORD / "overrides.yaml").is_file():
            return folder
    what = "is in no run folder" if path.exists() else "does not exist"
    raise ConfigError(f"resume={resume} {what}; type resume=<a run folder, with {RECORD}/ inside, or a snapshot in it>")


def _recorded_words(folder: Path, typed: list[str]) -> list[str]:
    """The overrides that composed the run, without those that `typed` replaces. Raises ConfigError without a record."""
    try:
        words = yaml.safe_load((folder / RECORD / "overrides.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{folder}/{RECORD}/overrides.yaml cannot be read ({reason}); type another folder") from None
    recorded = [str(word) for word in words or []]
    return [word for word in recorded if not _belongs_to(word, NOT_TAKEN) and not _is_replaced(word, typed)]


def _require_open_targets(folder: Path, words: list[str]) -> None:
    """Raise ConfigError for words of a record that may run anything: the record may be a stranger's."""
    for word in words:
        if chooses_foreign_target(word):
            typed = shlex.quote(word)
            raise ConfigError(
                f"{folder} was trained with {word}, which may run anything; if you trust it, type {typed}"
            )


def _is_replaced(word: str, typed: list[str]) -> bool:
    """Whether what is typed stands for `word`: the same key, or another option of its group."""
    groups = [name for name in map(_key, typed) if "." not in name]
    return _key(word) in map(_key, typed) or _belongs_to(word, groups)


def _belongs_to(word: str, names: list[str] | tuple[str, ...]) -> bool:
    """Whether `word` sets one of `names`, or what is below it."""
    return any(_key(word) == name or _key(word).startswith((f"{name}.", f"{name}/")) for name in names)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~").partition("@")[0]


def _require_flags(folder: Path, typed: list[str]) -> None:
    """A folder of configs may run anything, so the record of a run cannot ask for one."""
    recorded: list[str] = []
    with suppress(ConfigError):
        run = read_run(folder)
        recorded = [_from_anywhere(flag, run["cwd"]) for flag in run["flags"]]
    if recorded and not words_of_folders(typed):
        words = shlex.join(recorded)
        raise ConfigError(f"{folder} was trained with {words}; type {words} with this command, too")


def _from_anywhere(flag: str, cwd: str) -> str:
    """A folder of configs with its whole path: the run was started in `cwd`."""
    name, _, folder = flag.partition("=")
    return f"{name}={Path(cwd, folder)}" if name == "--config-dir" else flag


def _normalisation(folder: Path) -> Iterator[tuple[str, str]]:
    """(key, value) of the mean and the standard deviation in the run's config."""
    config: Any = {}
    with suppress(OSError, yaml.YAMLError):
        config = yaml.safe_load((folder / RECORD / "config.yaml").read_text())
    dataset = config.get("dataset") or {}
    for name in NORMALISATION:
        value = dataset.get(name)
        if name in dataset and (value is None or _are_numbers(value)):
            yield f"dataset.{name}", json.dumps(value)


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(number, int | float) for number in value)
