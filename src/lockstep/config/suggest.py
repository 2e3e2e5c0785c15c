"""What was probably meant by a key or an option that does not exist.

One rule: a suggestion is in the section that was typed, and is accepted when it is typed. Where there is none, the
sentence names the command that shows all keys. No torch here, but for the rules of a class that is suggested.
"""

import difflib
from collections.abc import Iterable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.config.schema import (
    GROUPS,
    SECTIONS,
    Rule,
    default_of,
    enumerate_words,
    find_rule,
    rules_in_conf,
    values_in_conf,
)

RANKS = "launch.nproc_per_node"
# {what other programs call a key: the key}, in whatever section it is typed.
OTHER_NAMES = {"lr": "optimizer.lr", "learning_rate": "optimizer.lr", "nproc_per_node": RANKS, "world_size": RANKS}
OTHER_NAMES |= dict.fromkeys(("ranks", "num_ranks", "procs", "nproc", "nprocs", "num_procs"), RANKS)
OTHER_NAMES |= dict.fromkeys(("processes", "num_processes", "devices", "num_devices"), RANKS)
OTHER_NAMES |= dict.fromkeys(("gpus", "n_gpus", "num_gpus"), RANKS)
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


def no_option(group: str, option: str, options: Iterable[str]) -> str:
    """The sentence for an option that its group does not have. options: those that it has."""
    meant = closest(option, options)
    instead = f"{group}={meant}" if meant else f"one of {' '.join(f'{group}={name}' for name in options)}"
    return f"{group}={option} is no option; type {instead}"


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
    if key.startswith("experiment/"):  # defaults: [override model: mlp]
        group = key.removeprefix("experiment/").partition("@")[0]
        return f"{key} is no config group; type `override /{group}: <option>` in the preset"
    if key in GROUPS or (find_rule(key) is not None and not key.startswith("dataset.")):
        return NOT_ON_CONFIG
    typed = "<value>" if value is None else value
    group, _, name = key.partition(".")
    if group in OWN_CLASSES and name and chosen.get(group) not in (None, *GROUPS[group]):
        return f"{key} is no key of this config; type +{key}={typed} if your class takes it"
    is_option = name in ("name", "type", "option") and value in GROUPS.get(group, ())
    owner = None if is_option or OTHER_NAMES.get(name, key) != key else _owner(key, chosen)
    if owner is None:
        return f"{key} is no key of this config; type {replacement(key, value, keys) or _all_keys(key)}"
    choose, listed, rule, default = owner
    if value is not None and rule is not None and not _is_accepted(rule, value):
        return f"{key} is a key of {listed} and must be {rule.must_be}; type {choose} " + rule.what_to_type(
            key, value, default
        )
    return f"{key} is a key of {listed}; type {choose} {key}={typed}"


def replacement(key: str, value: str | None, keys: Sequence[str]) -> str | None:
    """The words that were probably meant by a key and its value, None if nobody can tell. keys: of the config."""
    typed = "<value>" if value is None else value
    section, _, last = key.rpartition(".")
    if last == "_target_" or key.startswith(OPEN_HYDRA_KEYS):
        return f"+{key}={typed}"
    if last == "device":
        return f"backend={DEVICE_BACKENDS.get(typed.partition(':')[0], 'auto')}"
    meant = OTHER_NAMES.get(last)
    if meant is not None:
        launcher = "launch=torchrun " if meant == RANKS and RANKS not in keys else ""
        return f"{launcher}{meant}={typed}"
    option = closest(typed, GROUPS.get(section, ())) if last in ("name", "type", "option") else None
    if option is not None:  # optimizer.name=adam
        return f"{section}={option}"
    if not section:  # a config group: one with this option, or of the same letters, or spelled alike
        with_option = [group for group, options in GROUPS.items() if value in options]
        same_letters = [group for group in GROUPS if sorted(group) == sorted(key)]
        meant = closest(key, with_option) or closest(key, same_letters) or closest(key, GROUPS)
        if meant is not None:
            return f"{meant}={closest(typed, GROUPS[meant]) or '<value>'}"
    first, dot, rest = key.partition(".")
    known = {*GROUPS, *SECTIONS}
    if dot and first not in known:  # trainr.epoch
        key = f"{closest(first, known, similarity=0.8)}.{rest}"
    meant = _closest_key(key, value, keys)
    return None if meant is None else f"{meant}={typed}"


def removed_key(key: str) -> str:
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
        return f"the run needs {article} {key}; type one of {' '.join(f'{key}={option}' for option in GROUPS[key])}"
    if key in SECTIONS:
        return f"the run needs the section {key}; type {key}.<key>=<value> to change a value of it"
    return f"there is no {key} to remove; type {_all_keys(key)}"


def _all_keys(key: str) -> str:
    return ALL_HYDRA_KEYS if key.startswith("hydra.") else ALL_KEYS


def _closest_key(key: str, value: str | None, keys: Sequence[str]) -> str | None:
    """The key of the section that was typed which is spelled like `key`. Without a section: of any, by its last part.

    value: as typed; a key that does not accept it is none that was meant. None if unknown.
    """
    section, dot, last = key.rpartition(".")
    names: dict[str, str] = {}
    for candidate in keys:
        parent, _, name = candidate.rpartition(".")
        rule = find_rule(candidate)
        is_near = parent == section if dot else "." not in parent
        if is_near and (rule is None or value is None or _is_accepted(rule, value)):
            names.setdefault(name, candidate)
    longer = [name for name in names if last.endswith(f"_{name}")]  # trainer.max_epochs for trainer.epochs
    parts = last.split("_")  # each is alike: no warmup_epochs for warmup_steps
    alike = [
        name
        for name in names
        if all(closest(*pair) for pair in zip(parts, ([p] for p in name.split("_")), strict=False))
    ]
    meant = longer[0] if len(longer) == 1 else closest(last, alike, similarity=0.8)
    return None if meant is None else names[meant]


def _is_accepted(rule: Rule, value: str) -> bool:
    """Whether a rule accepts a value as typed. What Hydra cannot read is explained when it is read."""
    try:
        parsed = OverridesParser.create().parse_override(f"key={value}").value()
    except Exception:
        return True
    return rule.accepts(rule.as_declared(parsed)) or "${" in value


def _owner(key: str, chosen: dict[str, str]) -> tuple[str, str, Rule | None, object] | None:
    """Of launch.nproc_per_node with launch=env: (launch=fork, all options with this key, its rule, its value there)."""
    group, _, name = key.partition(".")
    logger, _, name_in_logger = name.partition(".")
    if group == "logger" and logger in GROUPS[group]:
        owners, name, choose = [logger], name_in_logger, f"logger=[console,{logger}]"
        values = values_in_conf(group, logger)[logger]
    else:
        others = [option for option in GROUPS.get(group, ()) if option != chosen.get(group) and group not in SECTIONS]
        owners = [option for option in others if name in values_in_conf(group, option)]
        if chosen.get("dataset") != "text":
            owners.sort(key=lambda option: f"{group}={option}" == "model=gpt")  # it reads token numbers only
        values = values_in_conf(group, owners[0]) if owners else {}
        choose = f"{group}={owners[0]}" if owners else ""
    if name not in values or name.startswith("_"):
        return None
    listed = enumerate_words([f"{group}={owners[0]}", *owners[1:]], "and")
    return choose, listed, rules_in_conf(group, owners[0]).get(name), values[name]
