"""What somebody probably meant by a key or an option that does not exist."""

import difflib
from collections.abc import Iterable, Sequence

import lockstep.config.dataset_options
import lockstep.config.model_options  # noqa: F401  (both add to GROUPS)
from lockstep.config.fields import enumerate_words, rules
from lockstep.config.options import GROUPS
from lockstep.config.renamed import renamed_key
from lockstep.config.schema import SECTIONS, find_rule

ALIASES = {
    "devices": "launch=torchrun launch.nproc_per_node",
    "gpus": "launch=torchrun launch.nproc_per_node",
    "nproc_per_node": "launch=torchrun launch.nproc_per_node",
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
}
DEVICE_BACKENDS = {"cuda": "nccl", "gpu": "nccl", "cpu": "gloo"}
ALL_KEYS = "python src/train.py --cfg job to see all keys"


def closest(word: str, words: Iterable[str]) -> str | None:
    """The one of `words` that is spelled most like `word`, None if none is."""
    match = difflib.get_close_matches(word, list(words), 1, 0.7)
    return match[0] if match else None


def closest_key(key: str, keys: Sequence[str]) -> str | None:
    """The key that was probably meant: with the same last part, or spelled alike, or with a last part spelled alike."""
    last = key.rpartition(".")[2]
    same_end = [candidate for candidate in keys if candidate.rpartition(".")[2] == last and candidate != key]
    if len(same_end) == 1:
        return same_end[0]
    if same_end:
        return closest(key, same_end) or same_end[0]
    by_end = {candidate.rpartition(".")[2]: candidate for candidate in reversed(keys)}
    match = closest(key, keys)
    if match is None:
        end = closest(last, by_end)
        match = by_end[end] if end else None
    return match


def unknown_key(key: str, value: str | None, keys: Sequence[str], chosen: dict[str, str]) -> str:
    """The sentence for a key that the config does not have.

    value: as typed, None if unknown. keys: of the composed config. chosen: {group: option}.
    """
    renamed = renamed_key(key, value)
    if renamed is not None:
        return renamed
    other_options = _key_of_other_options(key, value, chosen)
    if other_options is not None:
        return other_options
    return f"{key} is no key of this config; type {_replacement(key, value, keys)}"


def _replacement(key: str, value: str | None, keys: Sequence[str]) -> str:
    typed = "<value>" if value is None else value
    last = key.rpartition(".")[2]
    if last == "device":
        return f"backend={DEVICE_BACKENDS.get(typed.partition(':')[0], 'auto')}"
    if last in ALIASES and not any(candidate.endswith(f".{last}") for candidate in keys):
        return f"{ALIASES[last]}={typed}"
    meant = closest_key(key, keys)
    return f"{meant}={typed}" if meant else ALL_KEYS


def _key_of_other_options(key: str, value: str | None, chosen: dict[str, str]) -> str | None:
    """launch.nproc_per_node with launch=env: the options of the group that have this key."""
    group, _, name = key.partition(".")
    owners = [option for option, schema in GROUPS.get(group, {}).items() if name in rules(schema)]
    owners = [option for option in owners if option != chosen.get(group)]
    if not owners:
        return None
    typed = "<value>" if value is None else value
    listed = enumerate_words([f"{group}={owners[0]}", *owners[1:]], "and")
    return f"{key} is a key of {listed}; type {group}={owners[0]} {key}={typed}"


def removed_key(key: str, keys: Sequence[str]) -> str:
    """The sentence for `~key` where the key cannot be removed."""
    if key == "scheduler":
        return "the run needs a scheduler; type scheduler=constant"
    rule = find_rule(key)
    if rule is not None:
        if rule.nullable:
            return f"{key} cannot be removed; type {key}=null"
        return f"{key} cannot be removed; type {rule.what_to_type(key)}"
    if key in GROUPS:
        return f"the run needs a {key}; type {' or '.join(f'{key}={option}' for option in GROUPS[key])}"
    if key in SECTIONS:
        return f"the run needs the section {key}; type {key}.<key>=<value> to change a value of it"
    return f"there is no {key} to remove; type {closest_key(key, keys) or ALL_KEYS}"
