"""Checks of the values of a composed config, before anything is started."""

from collections.abc import Iterator
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config.dataset_options import DATASETS
from lockstep.config.fields import Rule, rules, show
from lockstep.config.optimizer_checks import check_optimizer, check_scheduler
from lockstep.config.options import TARGETS
from lockstep.config.renamed import RENAMED, renamed_key, renamed_option
from lockstep.config.schema import OPEN_SECTIONS, SECTIONS, Augment, Dataset, Run
from lockstep.config.suggest import removed_key, unknown_key
from lockstep.errors import ConfigError

Node = dict[str, Any]
NEEDED_GROUPS = ("model", "dataset", "optimizer", "scheduler", "strategy", "gradient_sync", "task", "launch", "mode")
HYDRA_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})


def check_config(cfg: DictConfig | Node) -> None:
    """Check every value that has a schema. Raises ConfigError for the first that is of the wrong type or out of range.

    Values of a node with a `_target_` that is not this project's own are not checked.
    """
    config = as_dict(cfg)
    _refuse_old_sections(config)
    _check_sections(config)
    for prefix, node, schema in described_nodes(config):
        for name, rule in rules(schema).items():
            if name in node:
                check_value(join(prefix, name), node[name], rule)
    _check_dataset(config)
    _check_model(config)
    _check_loggers(config)
    _check_metrics(config)
    check_optimizer(config["optimizer"])
    check_scheduler(config["scheduler"])


def check_value(key: str, value: object, rule: Rule) -> None:
    """Raise ConfigError if `rule` does not accept the value of `key`."""
    if not rule.accepts(value):
        raise ConfigError(wrong_value(key, value, rule))


def wrong_value(key: str, value: object, rule: Rule) -> str:
    """The sentence for a value that `rule` does not accept."""
    return f"{key}={show(value)} wants {rule.wants}; type {rule.what_to_type(key)}"


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


def nodes_with_target(node: object, key: str = "") -> Iterator[tuple[str, Node]]:
    """(key, node) of every node with a `_target_` inside `node`, itself included."""
    if isinstance(node, list):
        for index, child in enumerate(node):
            yield from nodes_with_target(child, f"{key}[{index}]")
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield key, node
        for name, child in node.items():
            yield from nodes_with_target(child, join(key, name))


def as_dict(cfg: DictConfig | Node) -> Node:
    """A config as plain dicts and lists, interpolations resolved where they can be. A plain dict as it is."""
    if isinstance(cfg, dict):
        return cfg
    try:
        container = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException:
        container = OmegaConf.to_container(cfg, resolve=False)
    return cast(Node, container)


def join(prefix: str, name: object) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """{"trainer.epochs": 5, ...}: the values of a config by their full keys."""
    if not isinstance(node, dict | DictConfig):
        return {prefix: list(node) if isinstance(node, ListConfig) else node}
    values = {}
    for name, child in node.items():
        values.update(flatten(child, join(prefix, name)))
    return values


def _leaves(node: object, key: str, parents: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(key, keys of the nodes around it) of every value. A node with a `_target_` starts a new list of parents."""
    if not isinstance(node, dict):
        yield key, parents
        return
    inside = [] if "_target_" in node else [*parents, key]
    for name, child in node.items():
        if name not in HYDRA_KEYS:
            yield from _leaves(child, join(key, name), inside)


def _refuse_old_sections(config: Node) -> None:
    """Sections of the first version that `+` has brought back. An old key in another section is an unknown key."""
    if isinstance(config.get("loop"), str):
        raise ConfigError(str(renamed_option("loop", config["loop"])))
    for key in RENAMED:
        section, _, name = key.partition(".")
        if section in ("timeline", "loop") and name in (config.get(section) or {}):
            raise ConfigError(str(renamed_key(key, show(config[section][name]))))


def _check_sections(config: Node) -> None:
    """`~key`, `key=value` for a whole section, and `+key` can change what the composition guarantees."""
    for name in (*SECTIONS, *NEEDED_GROUPS):
        if name not in config or config[name] is None:
            raise ConfigError(removed_key(name, []))
        if not isinstance(config[name], dict):
            raise ConfigError(f"{name} is a section, not a value; type {name}.<key>={show(config[name])}")
        if name in NEEDED_GROUPS and name != "dataset" and not isinstance(config[name].get("_target_"), str):
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
            raise ConfigError(f"{section} is a section, not a value; type {section}.<key>={show(node)}")
    return cast(Node, node)


def _known_keys(config: Node) -> list[str]:
    sections = SECTIONS | {"dataset.augment": Augment}
    keys = [join(section, key) for section, schema in sections.items() for key in rules(schema)]
    return keys + [join(group, key) for group in NEEDED_GROUPS for key in config[group]]


def _check_dataset(config: Node) -> None:
    """Both halves have a reader, and mean and std have one number for each channel, or one for all."""
    dataset = config["dataset"]
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


def _check_model(config: Node) -> None:
    """A model of this project takes the samples of the data set, and has an output for each of its classes."""
    model, dataset = config["model"], config["dataset"]
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


def _check_loggers(config: Node) -> None:
    loggers = config.get("logger", {})  # logger=[] leaves no section
    for key, node in loggers.items() if isinstance(loggers, dict) else [("", loggers)]:
        if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
            raise ConfigError(
                f"{join('logger', key)}={show(node)} is no logger; type logger=[] or logger=[console,csv]"
            )


def _check_metrics(config: Node) -> None:
    task = config.get("task") or {}
    if task.get("_target_") not in TARGETS:
        return
    for name, mode in task.get("metrics", {}).items():
        if mode not in ("min", "max"):
            key = f"task.metrics.{name}"
            raise ConfigError(f"{key}={show(mode)} wants min or max; type {key}=min or {key}=max")
