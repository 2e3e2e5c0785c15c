"""What was probably meant by a key or an option that does not exist.

One rule: a suggestion is in the section that was typed, and is accepted when it is typed. Where there is none, the
sentence names the command that shows all keys. No torch here, but for the rules of a class that is suggested.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.config.schema import (
    GROUPS,
    KEYS_BESIDE,
    SECTIONS,
    SPELLED_TRUTHS,
    Rule,
    default_of,
    enumerate_words,
    find_rule,
    rules,
    rules_in_conf,
    values_in_conf,
)

RANKS = "launch.nproc_per_node"
# {key: what other programs call it, in whatever section they have it}
NAMES_ELSEWHERE = {
    RANKS: "nproc_per_node world_size ranks num_ranks procs nproc nprocs num_procs processes num_processes devices "
    "num_devices gpus n_gpus num_gpus gpus_per_node",
    "optimizer.lr": "lr learning_rate",
    "optimizer.weight_decay": "wd l2",
    "trainer.batch_size": "batch_size bs train_batch_size",
    "trainer.batch_size_per_rank": "per_device_train_batch_size per_device_batch_size micro_batch_size",
    "trainer.gradient_accumulation_steps": "accumulate_grad_batches accumulation_steps grad_accum",
    "trainer.max_grad_norm": "gradient_clip_val clip_grad_norm grad_clip clip",
    "trainer.ema": "ema_decay",
    "trainer.max_steps": "max_iters limit_train_batches",
    "evaluation.batch_size": "eval_batch_size val_batch_size test_batch_size per_device_eval_batch_size",
    "evaluation.every": "check_val_every_n_epoch eval_every",
    "evaluation.patience": "early_stopping early_stopping_patience",
    "logging.every": "log_every_n_steps log_every log_interval logging_steps",
    "snapshot.every": "save_every checkpoint_every",
    "snapshot.keep_last": "save_top_k save_total_limit",
    "resume": "ckpt_path resume_from_checkpoint checkpoint",
    "hydra.run.dir": "output_dir out_dir save_dir log_dir logdir default_root_dir",
}
OTHER_NAMES = {name: key for key, names in NAMES_ELSEWHERE.items() for name in names.split()}
# num_workers, max_epochs, image_size
ADD_NOTHING = {"max", "num", "n", "nb", "no", "number", "of", "total", "train", "training", "random", "image", "param"}
# {what other programs call a loss: the task that has it}
TASKS_OF_LOSSES = dict.fromkeys(("mse", "mse_loss", "mseloss", "l2"), "regression")
TASKS_OF_LOSSES |= dict.fromkeys(("cross_entropy", "crossentropy", "crossentropyloss", "ce", "nll"), "classification")
TASKS_OF_LOSSES |= dict.fromkeys(("bce", "bcewithlogitsloss", "binary_cross_entropy"), "multi_label")
# Groups in which a class of the user's own, or an option of theirs, may take any key.
OWN_CLASSES = frozenset({"model", "optimizer", "scheduler", "strategy", "gradient_sync", "task", "launch", "mode"})
DEVICE_BACKENDS = {"cuda": "nccl", "gpu": "nccl", "cpu": "gloo", "mps": "auto"}
HOW_NOT_WHAT = frozenset({"launch", "strategy", "gradient_sync", "sweep", "logger", "mode"})  # workers of a launcher
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
    if word not in names and word.lower() in small:
        return small[word.lower()]
    match = difflib.get_close_matches(word, names, 1, similarity)
    match = match or [small[name] for name in difflib.get_close_matches(word.lower(), list(small), 1, similarity)]
    return match[0] if match else None


def no_option(group: str, option: str, options: Iterable[str]) -> str:
    """The sentence for an option that its group does not have. options: those that it has."""
    names = list(options)
    if group == "dataset" and "/" in option:
        return f"{group}={option} is no option; type dataset=image_folder dataset.root={option}"
    meant = _meant_option(group, option, names)
    instead = f"{group}={meant}" if meant else f"one of {' '.join(f'{group}={name}' for name in names)}"
    if meant is None and group in OWN_CLASSES and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", option):
        instead = f"{group}._target_={option}"  # model=torchvision.models.resnet50
    return f"{group}={option} is no option; type {instead}"


def _meant_option(group: str, option: str, names: Sequence[str]) -> str | None:
    """The option that was probably meant: spelled alike, or the only one that is in the word, or has it."""
    word = option.lower()
    if group == "backend" and word in DEVICE_BACKENDS:
        return DEVICE_BACKENDS[word]
    if group == "task" and word in TASKS_OF_LOSSES:
        return TASKS_OF_LOSSES[word]
    parts = [name for name in names if len(word) > 2 and word in name or len(name) > 2 and name in word]
    meant = closest(option, names) or (parts[0] if len(parts) == 1 else None)
    numbers = [set(re.findall(r"\d+", text)) for text in (word, meant or "")]
    return None if all(numbers) and numbers[0] != numbers[1] else meant  # no cifar10 for cifar100


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
    elif key == "profiler" and value in ("true", "false", *SPELLED_TRUTHS):
        typed = f"profiler.enabled={str(SPELLED_TRUTHS.get(value, value == 'true')).lower()}"
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
        instead = replacement(key, value, keys, chosen) or _all_keys(key)
        return f"{key} is no key of this config; type {instead}"
    choose, listed, rule, default = owner
    option = chosen.get(group)
    if group != "logger" and option not in (None, _default_option(group)):  # it was typed
        see = f"python src/train.py {group}={option} --cfg job"
        return f"{key} is a key of {listed}, and {group}={option} has none; type {see} to see all keys"
    if value is not None and rule is not None and not is_accepted(rule, value):
        return f"{key} is a key of {listed} and must be {rule.must_be}; type {choose} " + rule.what_to_type(
            key, value, default
        )
    return f"{key} is a key of {listed}; type {choose} {key}={typed}"


def replacement(
    key: str, value: str | None, keys: Sequence[str], chosen: Mapping[str, str] = MappingProxyType({})
) -> str | None:
    """The words that were probably meant by a key and its value, None if nobody can tell. keys: of the config.

    chosen: {group: option}.
    """
    typed = "<value>" if value is None else value
    section, _, last = re.sub(r"[/-]", lambda sign: "." if sign[0] == "/" else "_", key).rpartition(".")
    if key.startswith(OPEN_HYDRA_KEYS):
        return f"+{key}={typed}"
    if last == "_target_":
        node = find_rule(section)
        is_node = section in OWN_CLASSES or (node is not None and dict in node.kinds)
        return f"+{key}={typed}" if is_node else f"dataset.train._target_={typed}" if section == "dataset" else None
    if key in ("data", "dataset", "data_path") and "/" in typed:
        return f"dataset=image_folder dataset.root={typed}"
    if last in ("device", "accelerator"):
        return f"backend={DEVICE_BACKENDS.get(typed.partition(':')[0], 'auto')}"
    if last == "loss" and typed.lower() in TASKS_OF_LOSSES:
        return f"task={TASKS_OF_LOSSES[typed.lower()]}"
    meant = OTHER_NAMES.get(last)
    can_have = meant != RANKS or RANKS in keys or chosen.get("launch") in (None, _default_option("launch"))
    if meant == RANKS and RANKS not in keys:
        chosen = {**chosen, "launch": "torchrun"}
    if meant is not None and can_have and _key_accepts(meant, value, chosen):
        launcher = "launch=torchrun " if meant == RANKS and RANKS not in keys else ""
        return f"{launcher}{meant}={typed}"
    option = closest(typed, GROUPS.get(section, ())) if last in ("name", "type", "option") else None
    if option is not None:  # optimizer.name=adam
        return f"{section}={option}"
    meant = last if last in GROUPS else None  # trainer.strategy=ddp
    if not section:  # a config group: one with this option, or of the same letters, or spelled alike
        with_option = [group for group, options in GROUPS.items() if value in options]
        same_letters = [group for group in GROUPS if sorted(group) == sorted(last)]
        meant = closest(last, with_option) or closest(last, same_letters) or closest(last, GROUPS)
    if meant is not None:
        option = _meant_option(meant, typed, GROUPS[meant])
        if option is not None or not section:
            return f"{meant}={option or '<value>'}"
    first, dot, rest = section.partition(".")
    known = [*GROUPS, *SECTIONS]
    if section and first not in known:  # trainr.epoch, eval.every
        longer = [name for name in known if len(first) > 2 and name.startswith(first.lower())]
        section = f"{longer[0] if len(longer) == 1 else closest(first, known) or first}{dot}{rest}"
    as_word = _word_as_key(section, last, keys) if value in ("true", "True", None) else None
    if as_word is not None:
        return as_word
    meant = _closest_key(f"{section}.{last}" if section else last, value, keys, chosen)
    return None if meant is None else f"{meant}={typed}"


def rule_and_default(key: str, chosen: Mapping[str, str]) -> tuple[Rule | None, object]:
    """The rule of a key of a section or of an option, and its value in conf/. chosen: {group: option}."""
    group, _, name = key.partition(".")
    option = chosen.get(group) or _default_option(group)
    if find_rule(key) is not None or option is None or option not in GROUPS.get(group, ()):
        return find_rule(key), default_of(key)
    known = rules_in_conf(group, option) | (rules(KEYS_BESIDE[group]) if group in KEYS_BESIDE else {})
    return known.get(name), values_in_conf(group, option).get(name)


def _default_option(group: str) -> str | None:
    """The option of a group in conf/config.yaml."""
    choices = [item for item in values_in_conf()["defaults"] if isinstance(item, dict)]
    return next((str(item[group]) for item in choices if isinstance(item.get(group), str)), None)


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


def _closest_key(key: str, value: str | None, keys: Sequence[str], chosen: Mapping[str, str]) -> str | None:
    """The key of the section that was typed which is spelled like `key`. Without a section: of any, by its last part.

    A key of exactly the same last part is taken from any section, if it is the only one. value: as typed; a key that
    does not accept it is none that was meant. None if unknown.
    """
    section, dot, last = key.rpartition(".")
    plain = "_".join(word for word in last.split("_") if word not in ADD_NOTHING)
    same = [key for key in keys if key.rpartition(".")[2] in (last, plain) and last != "name"]
    same = [last] if last in same else [] if section.partition(".")[0] in HOW_NOT_WHAT else same
    own = [candidate for candidate in keys if candidate.rpartition(".")[0] == section]
    near = own if dot else [candidate for candidate in keys if candidate.count(".") < 2]
    names = {candidate.rpartition(".")[2]: candidate for candidate in reversed(near)}
    words = last.split("_")
    longer = [name for name in names if last.endswith(f"_{name}")]  # trainer.max_epochs for trainer.epochs
    longer = [name for name in longer if {*last.removesuffix(f"_{name}").split("_")} <= ADD_NOTHING]
    alike = [  # each word is: no warmup_epochs for warmup_steps
        name
        for name in names
        if all(closest(*pair) for pair in zip(words, ([word] for word in name.split("_")), strict=False))
    ]
    meant = longer[0] if len(longer) == 1 else closest(last, alike, similarity=0.8)
    found = names[meant] if meant else same[0] if len(same) == 1 else None
    return found if found is None or _key_accepts(found, value, chosen) else None


def _word_as_key(section: str, word: str, keys: Sequence[str]) -> str | None:
    """trainer.precision=fp16 for trainer.fp16=true, and mode=evaluate for evaluate=true."""
    near = [key for key in keys if key.rpartition(".")[0] == section or not section]
    found = [key for key in near if (rule := find_rule(key)) is not None and word in rule.words]
    found = found or [
        group for group, options in GROUPS.items() if not section and word in options and group != "logger"
    ]
    return f"{found[0]}={word}" if len(found) == 1 else None


def _key_accepts(key: str, value: str | None, chosen: Mapping[str, str]) -> bool:
    """Whether `key` accepts a value as typed, as far as its rule tells. value: None if unknown."""
    rule, _ = rule_and_default(key, chosen)
    return rule is None or value is None or is_accepted(rule, value)


def is_accepted(rule: Rule, value: str) -> bool:
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
