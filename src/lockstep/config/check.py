"""Checks of the values of a composed config, before anything is started."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from lockstep.config.options import DATASETS, GPT, GROUPS, SGD, TARGETS, Text
from lockstep.config.schema import (
    HYDRA_KEYS,
    OPEN_SECTIONS,
    SECTIONS,
    Augment,
    Dataset,
    Node,
    Rule,
    Run,
    as_dict,
    as_number,
    enumerate_words,
    flatten,
    join,
    nodes_with_target,
    rules,
    show,
)
from lockstep.config.suggest import (
    ALIASES,
    NOT_ON_CONFIG,
    closest,
    removed_key,
    unknown_key,
    value_for_section,
    without_package,
)
from lockstep.errors import ConfigError

NEEDED_GROUPS = ("model", "dataset", "optimizer", "scheduler", "strategy", "gradient_sync", "task", "launch", "mode")


def check_config(cfg: DictConfig | Node) -> None:
    """Check every value that has a schema. Raises ConfigError for the first that is of the wrong type or out of range.

    Values of a node with a `_target_` that is not this project's own are not checked.
    """
    config = as_dict(cfg)
    _check_sections(config)
    for prefix, node, schema in described_nodes(config):
        for name, rule in rules(schema).items():
            if name in node:
                check_value(join(prefix, name), node[name], rule)
    check_dataset(config["dataset"])
    check_model_fits_data(config["model"], config["dataset"])
    _check_called(config)
    _check_loggers(config)
    check_task(config)
    check_optimizer(config["optimizer"])
    check_scheduler(config["scheduler"])


def check_value(key: str, value: object, rule: Rule) -> None:
    """Raise ConfigError if `rule` does not accept the value of `key`."""
    if rule.accepts(value):
        return
    number = as_number(value) if rule.kind in (int, float) else None
    if number is not None and rule.accepts(number):
        decoded = f"""'{key}="${{oc.decode:${{oc.env:NAME}}}}"'"""
        raise ConfigError(
            f'{key}="{value}" is text, and wants {rule.wants}; type {key}={show(number)}, or {decoded} for the number '
            f"in an environment variable"
        )
    raise ConfigError(wrong_value(key, value, rule))


def wrong_value(key: str, value: object, rule: Rule) -> str:
    """The sentence for a value that `rule` does not accept."""
    shown = str(value) if rule.kind is int and isinstance(value, float) else show(value)  # 2.0, where 2 is right
    return f"{key}={shown} wants {rule.wants}; type {rule.what_to_type(key)}"


def unchecked_keys(cfg: DictConfig) -> list[str]:
    """One sentence for each key that only the config or only the schema has. Empty for every option in conf/."""
    config = as_dict(cfg)
    problems, described = [], set()
    for prefix, node, schema in described_nodes(config):
        names = set(rules(schema))
        described |= {join(prefix, name) for name in names}
        problems += [f"{join(prefix, name)} has a schema and no value in conf/" for name in sorted(names - set(node))]
    for key, parents in _leaves(config, "", []):
        if key not in described and not described & set(parents):
            problems.append(f"{key} has a value in conf/ and no schema")
    return problems


def described_nodes(config: Node) -> Iterator[tuple[str, Node, type]]:
    """(key, node, schema) of every node that has a schema: sections first, then the options of the groups."""
    yield "", config, Run
    for name, schema in SECTIONS.items():
        if name in config:
            yield name, config[name], schema
    dataset = config.get("dataset")
    if isinstance(dataset, dict):
        reader = dataset.get("train")
        target = reader.get("_target_") if isinstance(reader, dict) else None
        yield "dataset", dataset, DATASETS.get(str(target), Dataset)
        augment = dataset.get("augment")
        if isinstance(augment, dict):
            yield "dataset.augment", augment, Augment
    for key, node in nodes_with_target(config):
        if node["_target_"] in TARGETS:
            yield key, node, TARGETS[node["_target_"]]


def _leaves(node: object, key: str, parents: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(key, keys of the nodes around it) of every value. A node with a `_target_` starts a new list of parents."""
    if not isinstance(node, dict):
        yield key, parents
        return
    inside = [] if "_target_" in node else [*parents, key]
    for name, child in node.items():
        if name not in HYDRA_KEYS:
            yield from _leaves(child, join(key, name), inside)


def _check_sections(config: Node) -> None:
    """`~key`, `key=value` for a whole section, and `+key` can change what the composition guarantees."""
    for name in ("experiment", "local"):
        if config.get(name):
            raise ConfigError(without_package(name))
    if len(SECTIONS.keys() - config.keys()) > len(SECTIONS) // 2:
        raise ConfigError(NOT_ON_CONFIG)
    for name in (*SECTIONS, *NEEDED_GROUPS):
        if name not in config or config[name] is None:
            raise ConfigError(removed_key(name, []))
        if not isinstance(config[name], dict):
            raise ConfigError(value_for_section(name, show(config[name])))
        target = config[name].get("_target_")
        if name in NEEDED_GROUPS and name != "dataset" and not (isinstance(target, str) and target):
            raise ConfigError(f"{name}._target_ names no class; type {name}=<an option in conf/{name}>")
    for section, schema in (("", Run), *OPEN_SECTIONS.items()):
        node = _open_section(config, section)
        for key in rules(schema):
            if key not in node:
                raise ConfigError(removed_key(join(section, key), []))
    for name, schema in (*SECTIONS.items(), ("dataset.augment", Augment)):
        for key, value in _open_section(config, name).items():
            if key not in rules(schema):
                raise ConfigError(unknown_key(join(name, key), show(value), _known_keys(config), {}))


def _open_section(config: Node, section: str) -> Node:
    """The node with this dotted name, the whole config for an empty name."""
    node: Any = config
    for name in filter(None, section.split(".")):
        node = node.get(name, {})
        if not isinstance(node, dict):
            raise ConfigError(value_for_section(section, show(node)))
    return cast(Node, node)


def _known_keys(config: Node) -> list[str]:
    sections = SECTIONS | {"dataset.augment": Augment}
    keys = [join(section, key) for section, schema in sections.items() for key in rules(schema)]
    return keys + [join(group, key) for group in NEEDED_GROUPS for key in config[group]]


def _check_called(config: Node) -> None:
    """What is called has a `_target_`: a node without one stays a dict, or is left out without a word."""
    dataset, task = config["dataset"], config["task"]
    nodes = {f"dataset.{name}": dataset[name] for name in ("prepare", "collate_fn")}
    for name in ("transforms", "test_transforms", "batch_transforms"):
        nodes |= {f"dataset.{name}[{index}]": node for index, node in enumerate(dataset[name])}
    if task["_target_"] in TARGETS:
        nodes["task.loss"] = task.get("loss")
        nodes |= {f"task.measures.{name}": node or {} for name, node in task.get("measures", {}).items()}
    for key, node in nodes.items():
        if node is not None and not (isinstance(node, dict) and node.get("_target_")):
            typed = f"_target_:<module>.<class> in {key}" if "[" in key else f"++{key}._target_=<module>.<class>"
            raise ConfigError(f"{key}={show(node)} names no class or function; type {typed}")


def _check_loggers(config: Node) -> None:
    loggers = config.get("logger", {})  # logger=[] leaves no section
    for key, node in loggers.items() if isinstance(loggers, dict) else [("", loggers)]:
        if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
            raise ConfigError(
                f"{join('logger', key)}={show(node)} is no logger; type logger=[] or logger=[console,csv]"
            )


def check_dataset(dataset: dict[str, Any]) -> None:
    """Both halves have a reader, and mean and std have one number for each channel, or one for all."""
    for half in ("train", "test"):
        reader = dataset.get(half)
        if half == "test" and reader is None:
            raise ConfigError(
                "dataset.test=null leaves nothing to evaluate, and every run is evaluated; "
                "type dataset.test='${dataset.train}' to evaluate the training data"
            )
        if not isinstance(reader, dict) or "_target_" not in reader:
            raise ConfigError(
                f"dataset.{half}={show(reader)} reads no data; type dataset=<an option in conf/dataset>, "
                f"or +dataset.{half}._target_=<module>.<class>"
            )
    shape, augment = dataset.get("shape"), dataset["augment"]
    if isinstance(shape, list) and len(shape) != 3 and (augment["pad"] or augment["flip"]):
        raise ConfigError(
            f"dataset.augment is for images, and the samples have the shape {show(shape)}; "
            f"type dataset.augment.pad=0 dataset.augment.flip=false"
        )
    if not isinstance(shape, list) or len(shape) != 3:
        return
    for name in ("mean", "std"):
        values = dataset[name]
        if values is not None and len(values) not in (1, shape[0]):
            numbers = "1 number" if shape[0] == 1 else f"1 or {shape[0]} numbers"
            raise ConfigError(
                f"dataset.{name}={show(values)} wants {numbers}, as the images have the shape {show(shape)}; "
                f"type dataset.{name}=[0.5] or dataset.{name}=null"
            )


def check_model_fits_data(model: dict[str, Any], dataset: dict[str, Any]) -> None:
    """A model of this project takes the samples of the data set, and has an output for each of its classes."""
    if model["_target_"] not in TARGETS or not {"shape", "classes"} <= model.keys() & dataset.keys():
        return
    if model["shape"] != dataset["shape"]:
        raise ConfigError(
            f"model.shape={show(model['shape'])} does not fit dataset.shape={show(dataset['shape'])}; "
            f"type model.shape={show(dataset['shape'])}"
        )
    if None not in (model["classes"], dataset["classes"]) and model["classes"] < dataset["classes"]:
        raise ConfigError(
            f"model.classes={model['classes']} is less than dataset.classes={dataset['classes']}; "
            f"type model.classes={dataset['classes']}"
        )


def check_tokens(config: dict[str, Any]) -> None:
    """Raise ConfigError if model and data set are of this project, and only one of them has token numbers."""
    dataset = config.get("dataset")
    reader = DATASETS.get(_target(dataset.get("train") if isinstance(dataset, dict) else None))
    model = TARGETS.get(_target(config.get("model")))
    if model is None or reader is None or (model is GPT) == (reader is Text):
        return
    if reader is Text:
        raise ConfigError("dataset=text has token numbers, which this model does not read; type model=gpt")
    raise ConfigError("model=gpt reads token numbers, which this data set does not have; type dataset=text")


def _target(node: object) -> str:
    return str(node.get("_target_")) if isinstance(node, dict) else ""


LANGUAGE_MODELLING = "lockstep.tasks.language_modelling.LanguageModelling"
OF_LANGUAGE_MODELLING = ("loss", "perplexity")


def check_task(config: dict[str, Any]) -> None:
    """Raise ConfigError for keys that do not go together."""
    task = config.get("task") or {}
    if task.get("_target_") not in TARGETS:
        return
    if "loss" not in task.get("metrics", {}):
        raise ConfigError("task.metrics has no loss, which every run reports; type ++task.metrics.loss=min")
    _check_metrics(task)
    _check_own_parts(task)
    classes, known = task.get("classes"), config["dataset"].get("classes")
    if None not in (classes, known) and classes < known:
        raise ConfigError(f"task.classes={classes} is less than dataset.classes={known}; type task.classes={known}")


def _check_metrics(task: dict[str, Any]) -> None:
    for name, mode in task.get("metrics", {}).items():
        key = f"task.metrics.{name}"
        if mode not in ("min", "max"):
            raise ConfigError(f"{key}={show(mode)} wants min or max; type {key}=min or {key}=max")
        if task["_target_"] == LANGUAGE_MODELLING and name not in OF_LANGUAGE_MODELLING:
            known = " and ".join(OF_LANGUAGE_MODELLING)
            raise ConfigError(f"{key} is not measured by this task, which has {known}; type ~{key}")


def _check_own_parts(task: dict[str, Any]) -> None:
    """A key that would change nothing is refused."""
    smoothing = task.get("label_smoothing")
    if task.get("loss") and smoothing:
        raise ConfigError(
            f"task.label_smoothing={smoothing} is of the task's own loss, which task.loss replaces; "
            f"type task.label_smoothing=0, and ++task.loss.label_smoothing={smoothing} if your loss takes it"
        )
    for name in task.get("measures") or {}:
        if name not in task["metrics"]:
            raise ConfigError(
                f"task.measures.{name} is not in task.metrics, which says whether more is better; "
                f"type +task.metrics.{name}=max or +task.metrics.{name}=min"
            )


EXAMPLE = "optimizer.groups=[{match:fc,lr:0.1}]"
# What these optimizers of torch want, and no training here gives them.
UNFIT = {
    "LBFGS": ("computes the loss again and again in a step", "optimizer=adamw"),
    "SparseAdam": ("wants sparse gradients", "optimizer=adamw"),
    "Muon": ("is for matrices only", "optimizer=muon, which leaves the other parameters to AdamW"),
}


def check_optimizer(node: dict[str, Any]) -> None:
    """Raise ConfigError for hyperparameters that contradict each other, or groups that are none."""
    target = str(node.get("_target_"))
    name = target.rpartition(".")[2]
    if target.startswith("torch.optim.") and name in UNFIT:
        problem, advice = UNFIT[name]
        raise ConfigError(f"optimizer._target_={target} {problem}; type {advice}")
    schema = TARGETS.get(target)
    if schema is SGD and node.get("nesterov") and not node.get("momentum"):
        raise ConfigError("optimizer.nesterov=true wants a momentum above 0; type optimizer.momentum=0.9")
    for group in node.get("groups") or ():
        _check_group(group, schema)


def check_scheduler(node: dict[str, Any]) -> None:
    """Raise ConfigError for torch's schedule whose steps want a metric: a step or an epoch has none."""
    schedule = node.get("schedule")
    targets = [node.get("_target_"), schedule.get("_target_") if isinstance(schedule, dict) else None]
    if any(str(target).endswith("lr_scheduler.ReduceLROnPlateau") for target in targets):
        raise ConfigError("ReduceLROnPlateau is stepped with the result of an evaluation; type scheduler=plateau")


def _check_group(group: object, schema: type | None) -> None:
    patterns = group.get("match") if isinstance(group, dict) else None
    listed = patterns if isinstance(patterns, list) else [patterns]
    if not isinstance(group, dict) or not listed or not all(isinstance(pattern, str | int) for pattern in listed):
        raise ConfigError(f"optimizer.groups: {show(group)} says no match, the parameters' name; type {EXAMPLE}")
    if schema is None:
        return
    for name, value in group.items():
        rule = rules(schema).get(name)
        if rule is not None and not rule.accepts(value):
            typed = f"{{match:{show(patterns)},{name}:{show(rule.limits.example)}}}"
            raise ConfigError(
                f"optimizer.groups: {name}={show(value)} wants {rule.wants}; type optimizer.groups=[{typed}]"
            )


def with_floats(config: Node) -> Node:
    """A checked config, changed in place: every field for floats holds floats. AdamW refuses betas=[0.9,0]."""
    for _, node, schema in described_nodes(config):
        for name, rule in rules(schema).items():
            if name in node and rule.kind is float:
                node[name] = _as_float(node[name])
    return config


def _as_float(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_float(item) for item in value]
    return float(value) if type(value) is int else value


WORDS = {"False": "off", "True": "on"}  # also as text: a field for text turns a truth value into it


def with_yaml_booleans_as_words(config: Node) -> Node:
    """A config that is not checked yet, changed in place: {watch: {weights: off}} in a YAML file is "off"."""
    for _, node, schema in described_nodes(config):
        if not isinstance(node, dict):
            continue
        suspects = {name: WORDS[str(value)] for name, value in node.items() if str(value) in WORDS}
        if not suspects:
            continue
        for name, rule in rules(schema).items():
            words = rule.limits.words
            if suspects.get(name) in words and True not in words and False not in words:
                node[name] = suspects[name]
    return config


GROUPS_AND_SECTIONS = {*GROUPS, *SECTIONS}
FOLDERS = ("data_dir", "resume", "init", "run_dir")
READ = {*GROUPS_AND_SECTIONS, *rules(Run), "local", "experiment"}


def check_unread_overrides(cfg: DictConfig, values: Node, hydra_cfg: HydraConf) -> None:
    """Raise ConfigError for an unread key that stands for another: +epochs=3 for trainer.epochs=3.

    cfg: with its interpolations. values: of `cfg`, resolved. A key of the user's own, such as a tag, is left alone.
    """
    keys = list(flatten(values))
    names = {key.rpartition(".")[2] for key in keys if key.partition(".")[0] in GROUPS_AND_SECTIONS}
    for key, value in _unread(cfg, hydra_cfg).items():
        top, dot, _ = key.partition(".")
        is_name = key in names and key != "name"  # which is a label of the run, and no backend.name
        if _is_misspelled(top) or (not dot and (is_name or key in ALIASES)):
            others = [other for other in keys if other != key]
            raise ConfigError(unknown_key(key, value, others, {}))


def _is_misspelled(name: str) -> bool:
    """Of a group or a section. A label such as task_id or data is none."""
    same_letters = any(sorted(name) == sorted(other) for other in GROUPS_AND_SECTIONS)
    return same_letters or closest(name, GROUPS_AND_SECTIONS, similarity=0.88) is not None


def notice_of_unread_overrides(cfg: DictConfig, hydra_cfg: HydraConf) -> str:
    """A sentence about the keys with `+` that nothing reads, empty without such keys."""
    unread = list(_unread(cfg, hydra_cfg))
    if not unread:
        return ""
    return f"nothing in this run reads {enumerate_words(unread, 'or')}"


def _unread(cfg: DictConfig, hydra_cfg: HydraConf) -> dict[str, str]:
    """{key: value} as typed, of keys with a `+` that are no part of this project, nor of an interpolation."""
    words: Any = OmegaConf.to_container(hydra_cfg.overrides.task, resolve=False)
    typed = [str(word).lstrip("+").partition("=") for word in words if str(word).startswith("+")]
    own = {key: value for key, _, value in typed if key.partition(".")[0] in cfg.keys() - READ}
    if not own:
        return {}
    written = f"{OmegaConf.to_container(cfg, resolve=False)}{OmegaConf.to_container(hydra_cfg, resolve=False)}"
    read = set(re.findall(r"\$\{\.*(\w+)", written))  # ${width}, ${..width}
    read |= {word for given in re.findall(r"\$\{[\w.]+:([^{}]*)", written) for word in re.findall(r"\w+", given)}
    return {key: value for key, value in own.items() if key.partition(".")[0] not in read}


def with_whole_folders(cfg: DictConfig, hydra_cfg: HydraConf) -> DictConfig:
    """`cfg` with folders that mean the same where hydra.job.chdir=true makes the run's folder the current one."""
    if not hydra_cfg.job.chdir:
        return cfg
    typed = {key: OmegaConf.select(cfg, key) for key in FOLDERS}
    whole = {key: str(Path(hydra_cfg.runtime.cwd, path)) for key, path in typed.items() if isinstance(path, str)}
    return cast(DictConfig, OmegaConf.merge(cfg, whole))


RESOLVER = "oc.env"


def values_as_written(cfg: DictConfig) -> dict[str, str]:
    """{key: its text} of the values that an environment variable decides, directly or by another key.

    cfg: as composed, with its interpolations.
    """
    written = flatten(OmegaConf.to_container(cfg, resolve=False))
    asked: list[Any] = []

    def read(*arguments: Any) -> Any:
        asked.append(arguments[0])
        return oc.env(*arguments)

    OmegaConf.register_new_resolver(RESOLVER, read, replace=True)
    try:
        return {key: str(text) for key, text in written.items() if "${" in str(text) and _asks(cfg, key, asked)}
    finally:
        OmegaConf.register_new_resolver(RESOLVER, oc.env, replace=True)


def as_written(flat: Mapping[str, Any], written: Mapping[str, str]) -> dict[str, Any]:
    """A flat config in which the values of `written`, and what is below their keys, are text."""
    shown = dict(flat)
    for key in flat:
        for prefix, text in written.items():
            if key == prefix or key.startswith(f"{prefix}."):
                shown[key] = text
    return shown


def _asks(cfg: DictConfig, key: str, asked: list[Any]) -> bool:
    """Whether the value of `key` needs an environment variable. `asked` grows whenever one is read."""
    before = len(asked)
    with suppress(OmegaConfBaseException):  # `resolve` says what is wrong with it
        found = OmegaConf.select(cfg, key)
        if OmegaConf.is_config(found):
            OmegaConf.to_container(found, resolve=True)
    return len(asked) > before


# Where a run is, and how it was started: not what it computes.
LEFT_OUT = {"run_dir", "data_dir", "resume", "local", "mode", "trainer.pause_after"}
LEFT_OUT_BELOW = ("launch", "logger", "mode.", "backend.", "sweep.")
LEFT_OUT_NAMES = ("._target_", "._partial_", "sync_bn.mode")  # the option's name says it

Column = bool | int | float | str


def run_columns(flat: Mapping[str, Any], options: Mapping[str, str | None], world_size: int) -> dict[str, Column]:
    """{key: value} of a run: the options of the config groups, such as model, all keys, and the number of ranks.

    flat: the config by full keys. options: {config group: option}. Numbers stay numbers; lists become text. A key that
    is null is left out: TensorBoard would show all its values as text.
    """
    columns = {group: option for group, option in options.items() if "/" not in group} | dict(flat)
    columns["world_size"] = world_size
    return {
        key: value if isinstance(value, bool | int | float | str) else show(value)
        for key, value in columns.items()
        if value is not None
        and key not in LEFT_OUT
        and not key.startswith(LEFT_OUT_BELOW)
        and not key.endswith(LEFT_OUT_NAMES)
    }
