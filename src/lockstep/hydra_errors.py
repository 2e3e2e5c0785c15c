"""Errors of Hydra and OmegaConf as one sentence that ends in what to type instead. No torch here.

An error is known by its type and its attributes. Where it has none, the typed words are looked at, one after the other;
and where they are right, Hydra's own text follows what this project can say.
"""

import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import normalize

import hydra
import omegaconf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError, safe_load  # type: ignore[import-untyped]

from lockstep.compat import hydra_version_base
from lockstep.config.check import NEEDED_GROUPS, wrong_value
from lockstep.config.schema import CONF, GROUPS, SECTIONS, Rule, flatten
from lockstep.config.suggest import (
    closest,
    is_accepted,
    no_option,
    removed_key,
    rule_and_default,
    unknown_key,
    value_for_section,
)
from lockstep.distributed.run_folder import unwritable
from lockstep.errors import CannotStartNow, ConfigError, path_value, path_word, without_quotes
from lockstep.launchers.slurm import config_flags

HYDRA_HELP = "python src/train.py --hydra-help to see what Hydra accepts"
PLUGINS = {"optuna": "hydra-optuna-sweeper", "ax": "hydra-ax-sweeper", "nevergrad": "hydra-nevergrad-sweeper"}
PLUGINS |= {"ray": "hydra-ray-launcher"}
COPIED = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "\u2212": "-"})  # of a text that was copied


def as_config_error(error: BaseException, arguments: Sequence[str]) -> ConfigError | None:
    """The ConfigError for an error of the user's input, None for any other error. arguments: the words typed."""
    cause = find_cause(error)
    if cause is not None:
        return cause
    sentence = _sentence(error, list(arguments))
    kind = CannotStartNow if isinstance(error, OSError) else ConfigError
    return kind(sentence) if sentence else None


def find_cause(error: BaseException | None) -> ConfigError | None:
    """The ConfigError behind `error`: OmegaConf and Hydra wrap what a resolver raises."""
    return next((cause for cause in _causes(error) if isinstance(cause, ConfigError)), None)


def missing_value(error: OmegaConfBaseException) -> ConfigError:
    """The ConfigError for a config in which a mandatory value is missing, or an interpolation cannot be resolved."""
    key = error.full_key or "a key"
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"{key} has no value; type {key}=<value>")
    return ConfigError(f"{key} has no usable value ({_first_line(error)}); type {key}=<value>")


def typed_value(key: str, arguments: Sequence[str]) -> str | None:
    """What was typed for `key`, None if nothing was."""
    for word in reversed(arguments):
        name, equals, value = word.lstrip("+").partition("=")
        if equals and name == key:
            return value
    return None


def compose_typed(arguments: Sequence[str]) -> DictConfig | None:
    """The config with those of the typed overrides that choose an option or the objective, or without if that fails.

    It contains the node `hydra`. None if nothing can be composed, which Hydra then explains.
    """
    options = tuple(word for word in arguments if _chooses_an_option(word))
    return _compose(options) or _compose(())


def _sentence(error: BaseException, arguments: list[str]) -> str | None:
    if isinstance(error, YAMLError):
        return _unreadable_yaml(error)
    if isinstance(error, MissingConfigException):
        return _missing_option(error, arguments)
    if isinstance(error, OverrideParseException):
        typed = str(error.override)
        return _unreadable_override(error, typed, arguments) if "=" in typed else _without_value(typed, arguments)
    if isinstance(error, UnicodeDecodeError):
        return _unreadable_text(error)
    if isinstance(error, HydraException | OmegaConfBaseException):
        if isinstance(error, InstantiationException) and error.__cause__ and not _raised_by_hydra(error.__cause__):
            return None  # the class has failed: its traceback shows where
        is_about_config = isinstance(error, ConfigCompositionException | OmegaConfBaseException)
        return _composition_error(error, arguments) if is_about_config or _raised_by_hydra(error) else None
    if isinstance(error, OSError):
        return _run_folder_error(error, arguments)
    return _composition_error(error, arguments) if _raised_by_hydra(error) else None


def _composition_error(error: BaseException, arguments: list[str]) -> str:
    about = _about_one_key(error, arguments)
    if about is not None:
        return about
    for word in arguments:
        mistake = _mistake(word, arguments)
        if mistake is not None:
            return mistake
    reason = next(filter(None, map(_first_line, _causes(error))), type(error).__name__)
    if isinstance(error.__cause__, OmegaConfBaseException):
        reason = _first_line(error.__cause__)
    for word in arguments:
        if "=" in word and not word.startswith("-") and _compose((word,)) is None:
            return (
                _wrong_kind(word, arguments)
                or _mistake_in_file(word, arguments)
                or f"{word} cannot be composed ({reason}); type {word.partition('=')[0]}=<another value>"
            )
    return f"{reason.rstrip('.')}; type {HYDRA_HELP}"


def _about_one_key(error: BaseException, arguments: list[str]) -> str | None:
    """The sentence for an error of OmegaConf that knows its key."""
    cause = next((one for one in _causes(error) if isinstance(one, OmegaConfBaseException) and one.full_key), None)
    if cause is None:
        return None
    key = str(cause.full_key)
    for word in reversed(arguments):  # a.b.c=1, of which OmegaConf misses a
        name = word.partition("=")[0].lstrip("+~")
        key = name if name.startswith(f"{key}.") or name.partition("@")[0] == key else key
    roots = {word.lstrip("+~").partition("=")[0].partition(".")[0] for word in arguments} | {*SECTIONS, *GROUPS}
    if re.split(r"[.\[]", key)[0] not in roots:  # of a config that Hydra has made for itself
        return None
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        value = typed_value(key, arguments)
        if (CONF / key).is_dir() and value is not None:
            return f"config.yaml chooses no option of {key}; type +{key}={value}"
        return unknown_key(key, value, composed_keys(arguments), chosen_options(arguments))
    if key in SECTIONS:
        return value_for_section(key, "<value>")
    item, _, _ = key.partition("[")
    rule, default = rule_and_default(item, chosen_options(arguments))
    if rule is None or not isinstance(cause, ValidationError):
        return None
    typed = typed_value(item, arguments)
    return wrong_value(item, str(cause.value) if typed is None else typed, rule, default)


def _mistake(word: str, arguments: list[str]) -> str | None:
    """What is wrong with one typed word, as far as the other words do not matter. None if it seems right."""
    if word.startswith("-"):
        return None
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return None
    keys = composed_keys(arguments)
    key, value = word.partition("=")[0].lstrip("+~"), word.partition("=")[2]
    if override.is_interval_sweep():
        without = "".join(f", and leave {other} out" for other in arguments if other.startswith("hydra/sweeper="))
        return f"{word} is for a search; type -m sweep.search=random sweep.trials=20{without}"
    chosen = chosen_options(arguments)
    has_it = key in keys or key in chosen or any(name.startswith(f"{key}.") for name in keys)
    if override.is_sweep_override() and not {"-m", "--multirun"} & set(arguments):
        if not has_it and override.type == OverrideType.CHANGE:
            return unknown_key(key, value, keys, chosen)
        rule, _ = rule_and_default(key, chosen)
        is_list = key == "logger" or (
            rule is not None and not all(is_accepted(rule, item) for item in value.split(","))
        )
        meanings = f"[{value}]", value.replace(",", ".", 1), value.replace(",", "")  # 0,1 and 1,000
        for meant in meanings if is_list else ():
            if rule is None or is_accepted(rule, meant):
                return f"{word} is a sweep, and {key} takes no item of it; type {shlex.quote(f'{key}={meant}')}"
        return f"{word} is a sweep; type -m {shlex.quote(word)}"
    if override.type == OverrideType.DEL:
        return None if key.startswith("hydra.") else removed_key(key)  # Hydra may have it: its error says more
    if override.type == OverrideType.ADD and has_it:
        return f"{key} has a value already; type {key}={value or '<value>'}"
    is_group = any((folder / key).is_dir() for folder in config_folders(arguments))
    is_own = not (CONF / key).is_dir()  # a group may have the name of a section
    if override.type == OverrideType.CHANGE and is_group and (is_own or not has_it):
        return f"config.yaml chooses no option of {key}; type +{key}={value}"
    if override.type == OverrideType.CHANGE and not has_it and "@" in key:
        return unknown_key(key, value, keys, chosen)
    return None


def _wrong_kind(word: str, arguments: list[str]) -> str | None:
    """The sentence for a dict where a list belongs, and the like, which OmegaConf does not merge."""
    key, _, text = word.lstrip("+").partition("=")
    rule, default = rule_and_default(key, chosen_options(arguments))
    if rule is None or is_accepted(rule, text):
        return None
    return wrong_value(key, OverridesParser.create().parse_override(word).value(), rule, default)


def _without_value(typed: str, arguments: list[str]) -> str:
    """The sentence for a word without `=`, which is a key or none."""
    keys = composed_keys(arguments)
    plain = typed.lstrip("+")
    place = arguments.index(typed) if typed in arguments else 0
    before, following = arguments[place - 1] if place else "", arguments[place + 1 :]
    rule, _ = rule_and_default(before.partition("=")[0], {})
    # snapshot.every=100 steps
    if rule is not None and typed[0].isalpha() and _readable(before + typed, rule) is not None:
        return f"{before} {typed} has a space; type {before}{typed}"
    value = following[0] if following and not {"=", "~", "-"} & set(following[0]) else None
    joined = f"{plain}.{following[0]}" if following else ""
    if joined.partition("=")[0] in keys:  # trainer epochs=3
        return f"{typed} has no value; type {joined}"
    if ":" in typed and typed.partition(":")[0] in keys:  # trainer.epochs:3
        return f"{typed} has no value; type {typed.replace(':', '=', 1)}"
    if plain in SECTIONS and plain not in GROUPS:
        return value_for_section(plain, "<value>")
    if plain != typed or plain in (*GROUPS, "experiment") or any(f"{key}.".startswith(f"{plain}.") for key in keys):
        return f"{typed} has no value; type {typed}={'<value>' if value is None else value}"
    return unknown_key(typed, value, keys, chosen_options(arguments))


def _mistake_in_file(word: str, arguments: list[str]) -> str | None:
    """What is wrong with the file of the option that a word chooses, as far as its keys tell, None if nothing is."""
    group, _, option = word.lstrip("+").partition("=")
    files = [folder / group / f"{option}.yaml" for folder in config_folders(arguments)]
    text = next((file.read_text() for file in files if file.is_file()), "")
    values = safe_load(text)
    if not isinstance(values, dict):
        return None
    names = [name for item in values.get("defaults") or [] if isinstance(item, dict) for name in item]
    for name in [name.split()[-1] for name in names if name.startswith("override ")]:
        known = any((folder / name.lstrip("/")).is_dir() for folder in config_folders(arguments))
        if not name.startswith("/"):
            return unknown_key(f"{group}/{name}", None, [], {})
        if not known and not name.startswith("/hydra/"):
            return unknown_key(name.lstrip("/"), None, composed_keys(arguments), chosen_options(arguments))
    misplaced = [key for key in values if key in SECTIONS and not isinstance(values[key], dict)]
    return value_for_section(misplaced[0], str(values[misplaced[0]])) if misplaced else None


def config_folders(arguments: Sequence[str]) -> list[Path]:
    """conf/, and the folders of configs that were typed."""
    flag = _flags(arguments).get("--config-dir")
    return [CONF, *(Path(folder) for folder in [flag, *search_path(arguments)] if folder)]


def search_path(arguments: Sequence[str]) -> list[str]:
    """The folders of the typed hydra.searchpath."""
    typed = (typed_value("hydra.searchpath", arguments) or "").strip("[]'\"")
    folders = [item.strip(" '\"").removeprefix("file://") for item in typed.split(",")]
    return [folder for folder in folders if folder not in ("", "null")]


def _flags(arguments: Sequence[str]) -> dict[str, str]:
    """{--config-dir, --config-path or --config-name: what was typed}."""
    return {name: value for name, _, value in (flag.partition("=") for flag in config_flags(list(arguments)))}


def _unreadable_override(error: OverrideParseException, typed: str, arguments: list[str]) -> str:
    """The sentence for `key=value` that is not in Hydra's grammar: the reason, and a word near to it that is."""
    key, _, value = typed.partition("=")
    reason = _first_line(error.__cause__ or error.__context__ or error).partition(" expecting ")[0]
    place = next((vars(cause)["startIndex"] for cause in _causes(error) if "startIndex" in vars(cause)), None)
    if isinstance(place, int) and place < len(typed):  # of an error of the lexer
        reason = f"{typed[place]} must be in quotes"
    sentence = f"{typed} cannot be read ({reason})"
    chosen, keys = chosen_options(arguments), composed_keys(arguments)
    rule, default = rule_and_default(key.lstrip("+"), chosen)
    key, _, plain = normalize("NFKC", typed).translate(COPIED).strip(" \"'").partition("=")
    key, plain = re.sub(r"[^\w/@+~]+", ".", key).strip("."), without_quotes(plain.strip(" =,;"))
    if re.fullmatch(r"[a-z]\w*", key) and key not in {*keys, *GROUPS, *SECTIONS, "experiment"}:
        return unknown_key(key, os.path.expanduser(plain), keys, chosen)
    drawn = re.fullmatch(r"(log)?uniform\((.+)\)", plain)
    if drawn is not None:
        interval = f"tag(log,interval({drawn[2]}))" if drawn[1] else f"interval({drawn[2]})"
        return f"{sentence}; type -m sweep.search=random sweep.trials=20 {shlex.quote(f'{key}={interval}')}"
    inner = plain.strip("[]() ,")
    lists = (f"[{inner}]", f"[{path_value(inner)}]") if rule is not None and rule.is_list else ()
    for meant in (*lists, plain):
        if f"{key}={meant}" != typed and (readable := _readable(f"{key}={meant}", rule)) is not None:
            return f"{sentence}; type {readable}"
    pairs = (("(", ")"), ("[", "]"), ("{", "}"))
    if any(value.count(begin) != value.count(end) for begin, end in pairs) or value.count('"') % 2 == 1:
        return f"{sentence}; type {key}=<value>, with every bracket and quote closed"
    if rule is not None and str not in rule.kinds and "${" not in value:  # quotes would make it text
        return f"{sentence}; type {rule.what_to_type(key, default=default)}"
    return f"{sentence}; type {path_word(key, os.path.expanduser(value))}"  # quotes would keep a ~ as it is


def _readable(word: str, rule: Rule | None) -> str | None:
    """The word, quoted for a shell, if Hydra can read it and its key accepts the value."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return None
    return shlex.quote(word) if rule is None or rule.accepts(rule.as_declared(override.value())) else None


def _missing_option(error: MissingConfigException, arguments: list[str]) -> str:
    """The sentence for an option that its group does not have, or for the config that a run would begin with."""
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    if "//" in str(error.missing_cfg_file):  # dataset=/data/images
        group, _, option = str(error.missing_cfg_file).partition("/")
    for plugin, package in PLUGINS.items():
        if group.startswith("hydra/") and option.startswith(plugin):
            instead = ", or sweep.search=tpe sweep.trials=20 without it" if plugin == "optuna" else ""
            return f"{group}={option} needs a plugin of Hydra; type pip install {package}{instead}"
    options = sorted(error.options or [path.stem for path in (CONF / group).glob("*.yaml")])
    if not group or not options:
        return _missing_config(str(error.missing_cfg_file), arguments)
    return no_option(group, option, options)


def _missing_config(name: str, arguments: list[str]) -> str:
    """The sentence for a config that is in none of the folders of configs."""
    flags = _flags(arguments)
    config_name, config_path, folder = (flags.get(f"--config-{what}") for what in ("name", "path", "dir"))
    chosen = (config_name or "config").removesuffix(".yaml")
    if name.removesuffix(".yaml") != chosen:  # named in a defaults list
        return f"there is no config {name}; type --config-dir=<folder> to add a folder of configs"
    if config_path is not None:  # Hydra looks for it beside the script
        folder = str((Path(sys.argv[0]).parent / config_path.removeprefix("file://")).resolve())
        if config_name is None:
            instead = shlex.quote(f"--config-dir={folder}")
            return f"--config-path={config_path} has no config.yaml; type {instead} to add the folder to conf/"
    names = sorted(file.stem for file in Path(folder).glob("*.yaml")) if folder else []
    if not names:
        return f"there is no config {name}; type --config-dir=<the folder of {chosen}.yaml>"
    meant = names[0] if len(names) == 1 else closest(chosen, names)
    instead = f"--config-name={meant}" if meant else f"one of {' '.join(f'--config-name={name}' for name in names)}"
    return f"--config-name={name} is no config in {folder}; type {instead}"


def _unreadable_text(error: UnicodeDecodeError) -> str | None:
    """The sentence for a config file that is not UTF-8. None if Hydra was not reading a file."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = frame.f_locals.get("full_path")
        if path is not None and _is_hydras(frame.f_code.co_filename):
            return f"{path} is no text in UTF-8 ({error.reason}); type it again in an editor that saves UTF-8"
    return None


def _unreadable_yaml(error: YAMLError) -> str:
    """The sentence for a file that cannot be parsed: file, line, problem and what to type."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    advice = (
        "one `key: value` a line, each key once, keys of one level below each other, every bracket and quote closed"
    )
    if mark is None:
        return (
            f"{getattr(error, 'name', 'a config file')} is no YAML ({getattr(error, 'reason', error)}); type {advice}"
        )
    place = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1},"
    problem = ", ".join(filter(None, [getattr(error, "context", None), getattr(error, "problem", None)]))
    try:
        line = Path(mark.name).read_text().splitlines()[mark.line]
    except (OSError, IndexError, UnicodeDecodeError):
        line = ""
    if "\t" in line[: mark.column + 1]:
        advice = "spaces instead of the tab"
    return f"{place} is no YAML ({problem}); type {advice}"


def _run_folder_error(error: OSError, arguments: list[str]) -> str | None:
    """Hydra creates the run's folder itself, with Path.mkdir."""
    frames = list(traceback.walk_tb(error.__traceback__))
    names = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in frames]
    callers = [index for index, (file, _) in enumerate(names) if _is_hydras(file)]
    if not callers or callers[-1] + 1 >= len(names) or names[callers[-1] + 1][1] != "mkdir":
        return None
    key = "hydra.sweep.dir" if {"-m", "--multirun"} & set(arguments) else "hydra.run.dir"
    folder = typed_value(key, arguments) or error.filename
    return unwritable(str(folder), error, key)


def _raised_by_hydra(error: BaseException) -> bool:
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    while files and files[-1].endswith("/logging/config.py"):  # Python's, which Hydra calls with hydra.job_logging
        files.pop()
    return bool(files) and (_is_hydras(files[-1]) or Path(omegaconf.__file__).parent in Path(files[-1]).parents)


def _is_hydras(file: str) -> bool:
    return Path(hydra.__file__).parent in Path(file).parents


def composed_keys(arguments: Sequence[str]) -> list[str]:
    """Every key of the config that the typed options of groups compose."""
    cfg = compose_typed(arguments)
    if cfg is None:
        return []
    container = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(container, dict)
    return list(flatten({key: value for key, value in container.items() if key != "hydra"}))


def chosen_options(arguments: Sequence[str]) -> dict[str, str]:
    """{group: option} of that config. A group whose class was typed has the name of the class."""
    cfg: Any = compose_typed(arguments)
    chosen = {} if cfg is None else dict(cfg.hydra.runtime.choices)
    for group in NEEDED_GROUPS:
        own = typed_value(f"{group}._target_", arguments) or typed_value(group, arguments)
        chosen |= {group: own} if own is not None else {}
    return chosen


@cache
def _compose(overrides: tuple[str, ...]) -> DictConfig | None:
    """None if Hydra cannot compose these overrides."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), **hydra_version_base()):
            return compose("config", overrides=["run_dir=.", *overrides], return_hydra_config=True)
    except Exception:
        return None


def _chooses_an_option(word: str) -> bool:
    key, _, value = word.partition("=")
    if not value or not set(value) <= set("_./-") | {letter for letter in value if letter.isalnum()}:
        return False
    return key == "objective" or key.startswith(("task.", "hydra/")) or (CONF / key).is_dir()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    seen: set[int] = set()  # `raise error from error` is a chain without an end
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException | None) -> str:
    """Without OmegaConf's lines of the key and the type."""
    return " ".join(str(error or "").strip().partition("\n")[0].split())
