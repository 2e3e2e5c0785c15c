"""docs/configuration.md: every key, its type and range, its value in conf/ and what it is for.

Run as a program, it writes the tables between the two marker comments of the page again.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from lockstep import cli
from lockstep.compat import hydra_version_base
from lockstep.config.schema import (
    CONF,
    GROUPS,
    KEYS_BESIDE,
    SECTIONS,
    Dataset,
    Node,
    Rule,
    Run,
    join,
    rules,
    rules_in_conf,
    show,
)
from support.commands import ROOT

PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- begin: the tables of every key -->\n", "<!-- end -->\n"
TABLE = ["| key | accepts | default | what it is |", "|---|---|---|---|"]


def page_with_current_tables() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def tables() -> str:
    """Markdown tables of every key."""
    cli.register_resolvers()
    defaults = _compose([])
    lines = ["## The run", "", *TABLE, *_rows("", rules(Run), defaults), ""]
    for name, schema in SECTIONS.items():
        if name != "dataset.augment":
            lines += [f"## {name}", "", *TABLE, *_rows(name, rules(schema), defaults[name]), ""]
    about = "The keys of every data set. The defaults of `shape`, `classes`, `mean` and `std` are those of "
    about += "`dataset=digits`; in a data set of your own they are `null`."
    lines += ["## dataset", "", about, "", *TABLE, *_rows("dataset", rules(Dataset), defaults["dataset"])]
    lines += [*_rows("dataset.augment", rules(SECTIONS["dataset.augment"]), defaults["dataset"]["augment"]), ""]
    groups = ["dataset", *sorted(group for group in GROUPS if group not in (*SECTIONS, "dataset"))]
    # Composing takes 0.1 s: one config for an option of each group.
    for chosen in itertools.zip_longest(*([(group, option) for option in GROUPS[group]] for group in groups)):
        pairs = [pair for pair in chosen if pair is not None]
        config = _compose([f"{group}={option}" for group, option in pairs])
        defaults |= {f"{group}={option}": config[group] for group, option in pairs}
    for group in groups:
        lines += _group(group, {option: defaults[f"{group}={option}"] for option in GROUPS[group]})
    return "\n".join(lines) + "\n"


def _group(group: str, nodes: dict[str, Node]) -> Iterator[str]:
    """A heading, and a table for each option that has keys."""
    if group != "dataset":
        yield from (f"## {group}", "")
    if group in KEYS_BESIDE:
        rows = _rows(group, rules(KEYS_BESIDE[group]), next(iter(nodes.values())))
        yield from (f"Keys of every {group}:", "", *TABLE, *rows, "")
    rows_of = {}
    for option, node in nodes.items():
        key, node = (f"logger.{option}", node[option]) if group == "logger" else (group, node)
        rows_of[option] = list(_rows(key, rules_in_conf(group, option), node))
    without_keys = [f"`{group}={option}`" for option in nodes if not rows_of[option]]
    if without_keys:
        yield from (f"Without keys of their own: {', '.join(without_keys)}.", "")
    for option, rows in rows_of.items():
        if rows:
            yield from (f"`{group}={option}`", "", *TABLE, *rows, "")


def _rows(prefix: str, known: Mapping[str, Rule], node: Node) -> Iterator[str]:
    for name, rule in known.items():
        accepts = rule.must_be.replace("|", "\\|")
        yield f"| `{join(prefix, name)}` | {accepts} | `{_show(node[name])}` | {rule.help} |"


def _show(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else show(value)


def _compose(overrides: list[str]) -> Node:
    """The composed config, interpolations as they are written."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), **hydra_version_base()):
        container = OmegaConf.to_container(compose("config", overrides=overrides), resolve=False)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


if __name__ == "__main__":
    PAGE.write_text(page_with_current_tables())
