"""Errors of Hydra and OmegaConf as one sentence that ends in what to type instead. No torch here."""

import re
import traceback
from functools import cache
from typing import Any

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from lockstep.cli_missing import missing_option, unreadable_text
from lockstep.cli_override import unreadable_override
from lockstep.cli_yaml import unreadable_yaml
from lockstep.config.check import NEEDED_GROUPS, wrong_value
from lockstep.config.schema import CONF, GROUPS, SECTIONS, find_rule, flatten
from lockstep.config.suggest import removed_key, unknown_key, value_for_section
from lockstep.distributed.run_folder import unwritable
from lockstep.errors import CannotStartNow, ConfigError

HYDRA_HELP = "python src/train.py --hydra-help to see what Hydra accepts"


def as_config_error(error: BaseException, arguments: list[str]) -> ConfigError | None:
    """The ConfigError for an error of the user's input, None for any other error. arguments: the words typed."""
    cause = find_cause(error)
    if cause is not None:
        return cause
    sentence = _sentence(error, arguments)
    kind = CannotStartNow if isinstance(error, OSError) else ConfigError
    return kind(sentence) if sentence else None


def find_cause(error: BaseException | None) -> ConfigError | None:
    """The ConfigError behind `error`: OmegaConf and Hydra wrap what a resolver raises."""
    while error is not None:
        if isinstance(error, ConfigError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _sentence(error: BaseException, arguments: list[str]) -> str | None:
    if isinstance(error, YAMLError):
        return unreadable_yaml(error)
    if isinstance(error, MissingConfigException):
        return missing_option(error, arguments)
    if isinstance(error, OverrideParseException):
        typed = str(error.override)
        return unreadable_override(error) if "=" in typed else _without_value(typed, arguments)
    if isinstance(error, UnicodeDecodeError):
        return unreadable_text(error)
    if isinstance(error, ConfigCompositionException | OmegaConfBaseException):
        return _composition_error(error, arguments)
    if isinstance(error, OSError):
        return _run_folder_error(error, arguments)
    if "does not support sweep type" in str(error):
        return (
            "interval() and other distributions are for a search; "
            "type sweep.search=random sweep.trials=20, and leave hydra/sweeper= out"
        )
    if isinstance(error, InstantiationException):
        return _target_error(error)
    if isinstance(error, HydraException) or _raised_by_hydra(error):
        return _composition_error(error, arguments)
    return None


def _without_value(typed: str, arguments: list[str]) -> str:
    """The sentence for a word without `=`, which is a key or none."""
    keys = composed_keys(arguments)
    plain = typed.lstrip("+")
    if plain != typed or plain in (*GROUPS, "experiment") or any(f"{key}.".startswith(f"{plain}.") for key in keys):
        return f"{typed} has no value; type {typed}=<value>"
    return unknown_key(typed, None, keys, chosen_options(arguments))


def _composition_error(error: BaseException, arguments: list[str]) -> str:
    text = f"{error}\n{error.__cause__ or ''}"
    key = _key_in_error(text)
    typed = _group(r"argument '([^']+)'", text) or _group(r"Sweep parameters '([^']+)'", text)
    if typed is not None:
        return f"{typed} is a sweep; type -m {typed}"
    if key is not None and ("Could not delete" in text or "does not support deletion" in text):
        return removed_key(key.partition("=")[0], composed_keys(arguments))
    if key is not None and "Could not append" in text:
        return f"{key} has a value already; type {key}={typed_value(key, arguments) or '<value>'}"
    if key in SECTIONS and "Cannot merge" in text:
        return value_for_section(key, "<value>")
    if key is not None and "To append to your default list" in text:
        return f"config.yaml chooses no option of {key}; type +{key}={typed_value(key, arguments) or '<option>'}"
    if key is not None and ("not in" in text or "Could not override" in text):
        return unknown_key(key, typed_value(key, arguments), composed_keys(arguments), chosen_options(arguments))
    rule = find_rule(re.sub(r"\[\d+\]$", "", key)) if key else None
    if key is not None and rule is not None:
        return wrong_value(key, typed_value(key, arguments) or _group(r"Value '(.*?)' ", text), rule)
    misplaced = re.search(r"Merge error: \w+ is not a subclass of (\w+)\. value: (.*)", text)
    if misplaced is not None:  # a preset with `backend: gloo`
        section = next((name for name, schema in SECTIONS.items() if schema.__name__ == misplaced[1]), None)
        if section is not None:  # not one of Hydra's own
            return value_for_section(section, misplaced[2])
    reason = _first_line(error.__cause__) or _one_line(error) or type(error).__name__
    for word in arguments:
        if "=" in word and _compose((word,)) is None:
            return f"{word} cannot be composed ({reason}); type {word.partition('=')[0]}=<another value>"
    return f"{reason}; type {HYDRA_HELP}"


def _key_in_error(text: str) -> str | None:
    """The key that the text of an error of Hydra or OmegaConf is about."""
    typed = _group(r"Could not (?:override|delete(?: from config\.)?) '([^']+)'", text)
    typed = typed or _group(r"already at '([^']+)'", text)
    inner = _group(r"full_key: (\S+)", text)
    if inner is not None and (typed is None or inner.startswith(f"{typed}.")):  # trainer={epoch:3}: trainer.epoch
        return inner
    return typed


def missing_value(error: OmegaConfBaseException) -> ConfigError:
    """The ConfigError for a config in which a mandatory value is missing, or an interpolation cannot be resolved."""
    missing = _group(r"Missing mandatory value: (\S+)", str(error))
    if missing is not None:
        return ConfigError(f"{missing} has no value; type {missing}=<value>")
    key = error.full_key or "a key"
    return ConfigError(f"{key} has no usable value ({_one_line(str(error).splitlines()[0])}); type {key}=<value>")


def _target_error(error: InstantiationException) -> str | None:
    """Why a `_target_` cannot be imported. None if the class itself has failed: its traceback shows where."""
    from lockstep.config.targets import locate

    path = _group(r"Error locating target '([^']+)'", str(error))
    key = _group(r"full_key: (\S+)", str(error))
    if path is None or key is None:
        return None
    try:
        locate(f"{key}._target_", path, key.partition(".")[0])
    except ConfigError as reason:
        return str(reason)
    return None


def _run_folder_error(error: OSError, arguments: list[str]) -> str | None:
    """Hydra creates the run's folder itself, with Path.mkdir."""
    frames = list(traceback.walk_tb(error.__traceback__))
    names = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in frames]
    callers = [index for index, (file, _) in enumerate(names) if "/hydra/" in file.replace("\\", "/")]
    if not callers or callers[-1] + 1 >= len(names) or names[callers[-1] + 1][1] != "mkdir":
        return None
    multirun = {"-m", "--multirun"} & set(arguments)
    key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
    folder = typed_value(key, arguments) or error.filename
    return unwritable(str(folder), error, key)


def _raised_by_hydra(error: BaseException) -> bool:
    files = [frame.f_code.co_filename.replace("\\", "/") for frame, _ in traceback.walk_tb(error.__traceback__)]
    while files and files[-1].endswith("/logging/config.py"):  # Python's, which Hydra calls with hydra.job_logging
        files.pop()
    return bool(files) and ("/hydra/" in files[-1] or "/omegaconf/" in files[-1])


def typed_value(key: str, arguments: list[str]) -> str | None:
    """What was typed for `key`, None if nothing was."""
    for word in reversed(arguments):
        name, equals, value = word.lstrip("+").partition("=")
        if equals and name == key:
            return value
    return None


def composed_keys(arguments: list[str]) -> list[str]:
    """Every key of the config that the typed options of groups compose."""
    cfg = compose_typed(arguments)
    if cfg is None:
        return []
    container = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(container, dict)
    return list(flatten({key: value for key, value in container.items() if key != "hydra"}))


def chosen_options(arguments: list[str]) -> dict[str, str]:
    """{group: option} of that config. A group whose class was typed has the name of the class."""
    cfg: Any = compose_typed(arguments)
    chosen = {} if cfg is None else dict(cfg.hydra.runtime.choices)
    for group in NEEDED_GROUPS:
        own = typed_value(f"{group}._target_", arguments) or typed_value(group, arguments)
        chosen |= {group: own} if own is not None else {}
    return chosen


def compose_typed(arguments: list[str]) -> DictConfig | None:
    """The config with those of the typed overrides that choose an option or the objective, or without if that fails.

    It contains the node `hydra`. None if nothing can be composed, which Hydra then explains.
    """
    return _compose_options(tuple(word for word in arguments if _chooses_an_option(word)))


@cache
def _compose_options(options: tuple[str, ...]) -> DictConfig | None:
    return _compose(options) or _compose(())


def _compose(overrides: tuple[str, ...]) -> DictConfig | None:
    """None if Hydra cannot compose these overrides."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", overrides=["run_dir=.", *overrides], return_hydra_config=True)
    except Exception:
        return None


def _chooses_an_option(word: str) -> bool:
    key, _, value = word.partition("=")
    if re.fullmatch(r"[\w./-]+", value) is None:
        return False
    return key == "objective" or key.startswith(("task.", "hydra/")) or (CONF / key).is_dir()


def _group(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _first_line(error: BaseException | None) -> str:
    """Without OmegaConf's lines of the key and the type."""
    return _one_line(str(error or "").strip().partition("\n")[0])
