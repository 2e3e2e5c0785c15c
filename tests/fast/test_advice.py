"""Every `key=value` that a sentence in src/ tells people to type exists, and its value is accepted."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from lockstep.config.schema import (
    GROUPS,
    SECTIONS,
    Dataset,
    OptimizerKeys,
    Rule,
    Run,
    join,
    rules,
    rules_in_conf,
    values_in_conf,
)
from support.commands import ROOT

FILLED_IN = "\0"  # of an f-string
WORD = re.compile(rf"[+~]*(?P<key>[a-z_]+(\.[a-z_]+)*)=(?P<value>[^\s{FILLED_IN}<>.…][^\s{FILLED_IN}<>]*)?")
# Words that are no keys of the config: in a sentence about a file, about Hydra, or about the user's own code.
OTHERS = frozenset({"key", "sweep.dir", "run.dir", "reduction", "env"})


def sentences() -> Iterator[tuple[str, str]]:
    """(file:line, text) of every text in src/ with "type ", its values left out."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        inside = {id(part) for node in joined for part in node.values}
        for node in [*joined, *ast.walk(tree)]:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else FILLED_IN for part in parts]
            text = "".join(part for part in texts if isinstance(part, str))
            if id(node) not in inside and "type " in text:
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", text


def advised() -> Iterator[tuple[str, str, str]]:
    """(file:line, key, value) of every word to type in them. The value is empty where the sentence fills it in."""
    for place, text in sentences():
        for word in re.split(r"[\s`]+", text.partition("type ")[2].replace("'", " ")):
            found = WORD.fullmatch(word.rstrip(",.;:)"))
            if found is not None and found["key"] not in OTHERS and not found["key"].startswith("hydra."):
                value = found["value"] or ""
                yield place, found["key"], "" if "..." in value or "%" in value else value


def known_keys() -> dict[str, list[Rule | None]]:
    """{key: its rules} of every section and every option. None: a key that takes any value."""
    found: dict[str, list[Rule | None]] = defaultdict(list)
    for section, schema in {"": Run, "dataset": Dataset, "optimizer": OptimizerKeys, **SECTIONS}.items():
        for name, rule in rules(schema).items():
            found[join(section, name)].append(rule)
    for group, options in GROUPS.items():
        for option in options:
            values = values_in_conf(group, option)
            prefix, values = (f"logger.{option}", values[option]) if group == "logger" else (group, values)
            known = rules_in_conf(group, option)
            for name in values:
                found[f"{prefix}.{name}"].append(known.get(name))
    return found


def is_accepted(word: str, known: list[Rule | None]) -> bool:
    try:
        value = OverridesParser.create().parse_override(word).value()
    except HydraException:  # the sentence goes on behind a blank
        return True
    return any(rule is None or rule.accepts(rule.as_declared(value)) for rule in known)


def test_the_words_that_a_sentence_says_to_type_are_accepted() -> None:
    keys, wrong, tried = known_keys(), list[str](), 0
    for place, key, value in advised():
        tried += 1
        group, _, name = key.partition(".")
        if key in (*GROUPS, "experiment"):
            options = {path.stem for path in (Path(ROOT) / "conf" / key).glob("*.yaml")}
            right = value.strip("[]") == "" or set(value.strip("[]").split(",")) <= options
        elif group == "task" and name.startswith(("metrics.", "loss.", "measures.")):
            right = True  # keys of the user's own
        else:
            right = key in keys and (not value or is_accepted(f"{key}={value}", keys[key]))
        if not right:
            wrong.append(f"{place}: {key}={value}")
    assert wrong == [], "\n".join(wrong)
    assert tried > 200
