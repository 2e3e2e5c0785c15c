"""What was probably meant by a key or an option that does not exist.

One rule: a suggestion is in the section that was typed, and is accepted when it is typed. Where there is none, the
sentence names the command that shows all keys. No torch here, but for the rules of a class that is suggested.
"""

import difflib
import re
from collections.abc import Iterable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.config.schema import (
    GROUPS,
    SECTIONS,
    Rule,
    default_of,
    enumerate_words,
    find_rule,
    join,
    rules_in_conf,
    values_in_conf,
)

# Other names of keys, in whatever section they are typed.
ALIASES = {
    "devices": "launch=torchrun launch.nproc_per_node",
    "gpus": "launch=torchrun launch.nproc_per_node",
    "nproc_per_node": "launch=torchrun launch.nproc_per_node",
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
}
# Names that other launchers have for the ranks on a machine. `launch.ranks` is a key of launch=dry.
RANK_COUNTS = frozenset({"ranks", "num_ranks", "procs", "nprocs", "nproc", "num_procs", "num_processes", "processes"})
RANK_COUNTS |= {"world_size", "workers", "num_workers", "devices", "num_devices", "gpus", "num_gpus", "n_gpus"}
# Groups in which a class of the user's own, or an option of theirs, may take any key.
OWN_CLASSES = frozenset({"model", "optimizer", "scheduler", "strategy", "gradient_sync", "task", "launch", "mode"})
DEVICE_BACKENDS = {"cuda": "nccl", "gpu": "nccl", "cpu": "gloo"}
ALL_KEYS = "python src/train.py --cfg job to see all keys"
ALL_HYDRA_KEYS = "python src/train.py --cfg hydra to see Hydra's keys"
# Nodes of Hydra that take any key.
OPEN_HYDRA_KEYS = ("hydra.job.env_set.", "hydra.callbacks.", "hydra.job_logging.", "hydra.hydra_logging.")
NOT_ON_CONFIG = (
    "the config named by --config-name does not build on config.yaml; "
    "type `defaults: [config, _self_]` at the top of its file"
)


def closest(word: str, words: Iterable[str], similarity: float = 0.7) -> str | None:
    """The one of `words` that is spelled most like `word`, None if none is. similarity: from 0 to 1."""
    names = list(words)
    small = {name.lower(): name for name in names}  # for dataset=MNIST
    match = difflib.get_close_matches(word, names, 1, similarity)
    match = match or [small[name] for name in difflib.get_close_matches(word.lower(), list(small), 1, similarity)]
    return match[0] if match else None


def closest_group(name: str, option: str | None) -> str | None:
    """The config group that was probably meant: one with this option, or of the same letters, or spelled alike."""
    with_option = [group for group, options in GROUPS.items() if option in options]
    same_letters = [group for group in GROUPS if sorted(group) == sorted(name)]
    return closest(name, with_option) or closest(name, same_letters) or closest(name, GROUPS)


def closest_key(key: str, value: str | None, keys: Sequence[str]) -> str | None:
    """The key of the section that was typed which is spelled like `key`. Without a section: of any, by its last part.

    value: as typed; a key that does not accept it is none that was meant. None if unknown.
    """
    section, dot, last = key.rpartition(".")
    if last.startswith("_"):  # _target_ and such stand in many nodes
        return None
    names: dict[str, str] = {}
    for candidate in keys:
        parent, _, name = candidate.rpartition(".")
        if (parent == section or not dot) and _accepts(candidate, value):
            names.setdefault(name, candidate)
    longer = [name for name in names if last.endswith(f"_{name}")]  # trainer.max_epochs for trainer.epochs
    meant = longer[0] if len(longer) == 1 else closest(last, names, similarity=0.8)
    return None if meant is None else names[meant]


def _accepts(key: str, value: str | None) -> bool:
    rule = find_rule(key)
    return rule is None or value is None or _is_accepted(rule, value)


def _is_accepted(rule: Rule, value: str) -> bool:
    """Whether a rule accepts a value as typed. What Hydra cannot read is explained when it is read."""
    try:
        parsed = OverridesParser.create().parse_override(f"key={value}").value()
    except Exception:
        return True
    return rule.accepts(rule.as_declared(parsed)) or "${" in value


def without_package(group: str) -> str:
    """The sentence for a preset, or the values of this machine, that Hydra has put under the name of their folder."""
    place = "conf/local/default.yaml stands" if group == "local" else "the preset stands"
    return (
        f'{place} under the key {group}, which nothing reads; type "# @package _global_" as the first line of its file'
    )


def value_for_section(key: str, value: str) -> str:
    """The sentence for a value in the place of a whole section. value: as typed."""
    if key == "dataset.augment":
        typed = "dataset.augment.pad=0 dataset.augment.flip=false"
    elif key in GROUPS:
        typed = f"`override /{key}: {value}` in the defaults list of its YAML file"
    else:
        typed = f"{key}.<key>={value}"
    return f"{key} is a section, not a value; type {typed}"


def unknown_key(key: str, value: str | None, keys: Sequence[str], chosen: dict[str, str]) -> str:
    """The sentence for a key that the config does not have.

    value: as typed, None if unknown. keys: of the composed config. chosen: {group: option}.
    """
    placed = re.search("@(experiment|local)", key)  # model@experiment.model
    if placed is not None:
        return without_package(placed[1])
    without_slash = re.fullmatch(r"experiment/(\w+)(@.*)?", key)
    if without_slash is not None:
        group = without_slash[1]
        return f"experiment/{group} is no config group; type `override /{group}: <option>` in the preset"
    if key in GROUPS or (find_rule(key) is not None and not key.startswith("dataset.")):
        return NOT_ON_CONFIG
    typed = "<value>" if value is None else value
    group, _, name = key.partition(".")
    if group == "launch" and name in RANK_COUNTS and chosen.get("launch") != "dry":
        launcher = "" if "launch.nproc_per_node" in keys else "launch=torchrun "
        return f"{key} is no key of this config; type {launcher}launch.nproc_per_node={typed}"
    if group in OWN_CLASSES and name and chosen.get(group) not in (None, *GROUPS[group]):
        return f"{key} is no key of this config; type +{key}={typed} if your class takes it"
    return _key_of_other_options(key, value, chosen) or (
        f"{key} is no key of this config; type {_replacement(key, value, keys)}"
    )


def _replacement(key: str, value: str | None, keys: Sequence[str]) -> str:
    typed = "<value>" if value is None else value
    section, _, last = key.rpartition(".")
    if last == "_target_":
        return f"+{key}={typed}"
    if last == "device":
        return f"backend={DEVICE_BACKENDS.get(typed.partition(':')[0], 'auto')}"
    if last in ALIASES and join(section, last) not in keys:
        return f"{ALIASES[last]}={typed}"
    option = closest(typed, GROUPS.get(section, ())) if last in ("name", "type", "option") else None
    if option is not None:  # optimizer.name=adam
        return f"{section}={option}"
    meant = None if section else closest_group(key, value)
    meant = meant or closest_key(_with_known_section(key), value, keys)
    if meant in GROUPS:
        option = typed if typed in GROUPS[meant] else closest(typed, GROUPS[meant]) or "<option>"
        return f"{meant}={typed if value is None else option}"
    if meant is not None:
        return f"{meant}={typed}"
    if key.startswith(OPEN_HYDRA_KEYS):
        return f"+{key}={typed}"
    return ALL_HYDRA_KEYS if key.startswith("hydra.") else ALL_KEYS


def _with_known_section(key: str) -> str:
    """trainr.epoch -> trainer.epoch."""
    first, dot, rest = key.partition(".")
    known = {*GROUPS, *SECTIONS}
    return f"{closest(first, known, similarity=0.8)}.{rest}" if dot and first not in known else key


def _key_of_other_options(key: str, value: str | None, chosen: dict[str, str]) -> str | None:
    """The sentence for launch.nproc_per_node with launch=env: the options of the group that have this key."""
    group, _, name = key.partition(".")
    logger, _, option_of_logger = name.partition(".")
    if group == "logger" and logger in GROUPS["logger"]:
        if option_of_logger not in values_in_conf("logger", logger)[logger]:
            return None
        typed = f"logger=[console,{logger}] {key}={'<value>' if value is None else value}"
        return f"{key} is a key of logger={logger}, which this run does not have; type {typed}"
    if group in SECTIONS or name.startswith("_"):
        return None
    options = [option for option in GROUPS.get(group, ()) if option != chosen.get(group)]
    owners = [option for option in options if name in values_in_conf(group, option)]
    if chosen.get("dataset") != "text":
        owners.sort(key=lambda option: f"{group}={option}" == "model=gpt")  # it reads token numbers only
    if not owners:
        return None
    listed = enumerate_words([f"{group}={owners[0]}", *owners[1:]], "and")
    rule = None if value is None else rules_in_conf(group, owners[0]).get(name)
    if value is not None and rule is not None and not _is_accepted(rule, value):
        advice = rule.what_to_type(key, value, values_in_conf(group, owners[0])[name])
        return f"{key} is a key of {listed} and must be {rule.must_be}; type {group}={owners[0]} {advice}"
    return f"{key} is a key of {listed}; type {group}={owners[0]} {key}={'<value>' if value is None else value}"


def removed_key(key: str, keys: Sequence[str]) -> str:
    """The sentence for `~key` where the key cannot be removed."""
    if key == "logger":
        return "the list of loggers cannot be removed; type logger=[]"
    if key == "scheduler":
        return "the run needs a scheduler; type scheduler=constant"
    rule = find_rule(key)
    if rule is not None:
        typed = f"{key}=null" if rule.nullable else rule.what_to_type(key, default=default_of(key))
        return f"{key} cannot be removed; type {typed}"
    if key in GROUPS:
        article = "an" if key[0] in "aeiou" else "a"
        return f"the run needs {article} {key}; type {' or '.join(f'{key}={option}' for option in GROUPS[key])}"
    if key in SECTIONS:
        return f"the run needs the section {key}; type {key}.<key>=<value> to change a value of it"
    return f"there is no {key} to remove; type {closest_key(key, None, keys) or ALL_KEYS}"
