"""docs/configuration.md: every key, its type and range, its value in conf/ and what it is for."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from lockstep.compat import hydra_version_base
from lockstep.config.options import GROUPS, NoKeys
from lockstep.config.schema import CONF, SECTIONS, Augment, Dataset, Node, Run, join, rules, show

TABLE = ["| key | accepts | default | what it is |", "|---|---|---|---|"]


def documentation() -> str:
    """Markdown tables of every key. The schema must be registered."""
    defaults = _compose([])
    lines = ["## The run", "", *TABLE, *_rows("", Run, defaults), ""]
    for name, schema in SECTIONS.items():
        lines += [f"## {name}", "", *TABLE, *_rows(name, schema, defaults[name]), ""]
    about = "The keys of every data set. The defaults of `shape`, `classes`, `mean` and `std` are those of "
    about += "`dataset=digits`; in a data set of your own they are `null`."
    lines += ["## dataset", "", about, "", *TABLE, *_rows("dataset", Dataset, defaults["dataset"])]
    lines += [*_rows("dataset.augment", Augment, defaults["dataset"]["augment"]), ""]
    groups = [group for group in GROUPS if group not in (*SECTIONS, "dataset")]
    nodes = _nodes(["dataset", *groups])
    for group in ("dataset", *sorted(groups)):
        lines += _group(group, nodes[group])
    return "\n".join(lines) + "\n"


def _nodes(groups: list[str]) -> dict[str, dict[str, Node]]:
    """{group: {option: its keys as composed}} of the options that have keys."""
    found: dict[str, dict[str, Node]] = {group: {} for group in groups}
    with_keys = [
        [(group, option) for option, schema in GROUPS[group].items() if schema is not NoKeys] for group in groups
    ]
    for chosen in itertools.zip_longest(*with_keys):  # composing takes 0.1 s: one config for an option of each group
        pairs = [pair for pair in chosen if pair is not None]
        config = _compose([f"{group}={option}" for group, option in pairs])
        for group, option in pairs:
            found[group][option] = config[group]
    return found


def _group(group: str, nodes: dict[str, Node]) -> Iterator[str]:
    """A heading, and a table for each option that has keys."""
    if group != "dataset":
        yield from (f"## {group}", "")
    tables = {}
    for option, node in nodes.items():
        key = group
        if group == "logger":
            node, key = node[option], f"logger.{option}"
        tables[option] = list(_rows(key, GROUPS[group][option], node, skip=Dataset))
    without_keys = [f"`{group}={option}`" for option in GROUPS[group] if not tables.get(option)]
    if without_keys:
        yield from (f"Without keys of their own: {', '.join(without_keys)}.", "")
    for option, rows in tables.items():
        if rows:
            yield from (f"`{group}={option}`", "", *TABLE, *rows, "")


def _rows(prefix: str, schema: type, node: Node, skip: type | None = None) -> Iterator[str]:
    inherited = rules(skip) if skip is not None and issubclass(schema, skip) else {}
    for name, rule in rules(schema).items():
        if name not in inherited:
            accepts = rule.wants.replace("|", "\\|")
            yield f"| `{join(prefix, name)}` | {accepts} | `{_show(node[name])}` | {rule.limits.help} |"


def _show(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else show(value)


def _compose(overrides: list[str]) -> Node:
    """The composed config, interpolations as they are written."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), **hydra_version_base()):
        container = OmegaConf.to_container(compose("config", overrides=overrides), resolve=False)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
