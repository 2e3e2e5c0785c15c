"""Checks of the values of a composed config, before anything is started."""

from collections.abc import Iterator
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config.dataset_checks import check_dataset, check_model
from lockstep.config.dataset_options import DATASETS
from lockstep.config.fields import Rule, as_number, rules, show
from lockstep.config.optimizer_checks import check_optimizer, check_scheduler
from lockstep.config.options import TARGETS
from lockstep.config.renamed import RENAMED, renamed_key, renamed_option
from lockstep.config.schema import OPEN_SECTIONS, SECTIONS, Augment, Dataset, Run
from lockstep.config.suggest import NOT_ON_CONFIG, removed_key, unknown_key, value_for_section, without_package
from lockstep.config.task_checks import check_task
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
    check_dataset(config["dataset"])
    check_model(config["model"], config["dataset"])
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
