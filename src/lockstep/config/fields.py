"""How a field of the schema says what it accepts: its type, its range and an example, beside a line of help."""

import re
import sys
import types
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

LARGEST_SEED = 2**63 - 1
LARGEST_NUMBER: dict[type, float] = {int: 2**63 - 1, float: sys.float_info.max}


@dataclass(frozen=True)
class Limits:
    """What a field accepts beyond its annotation.

    min, max: included; above, below: excluded. words: strings and truth values that are accepted as they are.
    length: of a list. pattern: a regular expression for the whole of a string. wants: replaces the description of the
    accepted values. advice: replaces `key=example` as what to type.
    """

    help: str
    example: object = None
    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None
    words: tuple[object, ...] = ()
    length: int | None = None
    pattern: str | None = None
    wants: str | None = None
    advice: str | None = None


def value(help: str, **limits: Any) -> Any:
    """A field of a schema dataclass. It has no default: the values stand in conf/. `limits` are those of `Limits`."""
    return field(metadata={"limits": Limits(help, **limits)})


def number(help: str, example: object, **limits: Any) -> Any:
    """A field for a number, or for a list of numbers if the annotation is a list."""
    return value(help, example=example, **limits)


def names(help: str, example: list[str]) -> Any:
    """A field for a list of parameters' names, annotated as list[int]: the name of a layer may be a whole number."""
    return value(help, example=example, pattern=".+", wants="a list of names")


def choice(*words: object, help: str) -> Any:
    """A field that accepts `words` and nothing else. The first is the example."""
    return value(help, example=words[0], words=words)


@dataclass(frozen=True)
class Rule:
    """One field of the schema: what it accepts, and how that is said."""

    kind: type  # int, float, bool, str, dict or object (anything)
    is_list: bool
    nullable: bool
    limits: Limits

    @property
    def wants(self) -> str:
        """The accepted values in words: "a whole number of 1 or more, or null"."""
        text = self.limits.wants or self._describe()
        return f"{text}, or null" if self.nullable else text

    def accepts(self, value: object) -> bool:
        if value is None:
            return self.nullable or self.kind is object
        if not self.is_list:
            return self._accepts_item(value)
        if not isinstance(value, list) or self.limits.length not in (None, len(value)):
            return False
        return all(self._accepts_item(item) for item in value)

    def what_to_type(self, key: str) -> str:
        """`key=example`, or the advice of this field."""
        return self.limits.advice or f"{key}={show(self.limits.example)}"

    def _describe(self) -> str:
        item = self._describe_item()
        if not self.is_list:
            return item
        count = "items" if self.limits.length is None else f"{self.limits.length} items"
        return f"a list of {count}, each {item}"

    def _describe_item(self) -> str:
        words = [show(word) for word in self.limits.words]
        if self.kind in (int, float):
            words.insert(0, self._describe_number())
        elif not words:
            words = {bool: ["true", "false"], str: ["text"], dict: ["keys with values"], object: ["any value"]}[
                self.kind
            ]
        return enumerate_words(words, "or")

    def _describe_number(self) -> str:
        limits = self.limits
        noun = "a whole number" if self.kind is int else "a number"
        if limits.above is not None and limits.below is not None:
            return f"{noun} between {limits.above} and {limits.below}, both excluded"
        if limits.min is not None and limits.below is not None:
            return f"{noun} from {limits.min} to less than {limits.below}"
        if limits.min is not None and limits.min == limits.max:
            return str(limits.min)
        if limits.min is not None and limits.max is not None:
            return f"{noun} from {limits.min} to {limits.max}"
        if limits.min is not None:
            return f"{noun} of {limits.min} or more"
        return noun if limits.above is None else f"{noun} above {limits.above}"

    def _accepts_item(self, value: object) -> bool:
        if any(type(value) is type(word) and value == word for word in self.limits.words):
            return True
        if self.limits.pattern is not None and isinstance(value, str):
            return re.fullmatch(self.limits.pattern, value) is not None
        if self.kind is int:
            return type(value) is int and self._in_range(value)
        if self.kind is float:
            return type(value) in (int, float) and self._in_range(value)  # type: ignore[arg-type]
        if self.limits.words:
            return False
        if self.kind is str:
            return isinstance(value, str) and value != ""
        return isinstance(value, self.kind)

    def _in_range(self, value: float) -> bool:
        limits = self.limits
        return (
            -LARGEST_NUMBER[self.kind] <= value <= LARGEST_NUMBER[self.kind]  # no nan, and what torch can hold
            and (limits.min is None or value >= limits.min)
            and (limits.max is None or value <= limits.max)
            and (limits.above is None or value > limits.above)
            and (limits.below is None or value < limits.below)
        )


def rules(schema: type) -> dict[str, Rule]:
    """{name: rule} of a schema dataclass, in the order of its fields."""
    hints = get_type_hints(schema)
    return {item.name: _rule(item, hints[item.name]) for item in fields(schema)}


def _rule(item: Field[Any], hint: Any) -> Rule:
    members = list(get_args(hint)) if isinstance(hint, types.UnionType) else [hint]
    nullable = type(None) in members
    limits: Limits = item.metadata["limits"]
    kinds = [member for member in members if member is not type(None)]
    is_list = get_origin(kinds[0]) is list
    kind = get_args(kinds[0])[0] if is_list else kinds[0]
    kind = get_origin(kind) or kind
    return Rule(object if kind is Any else kind, is_list, nullable, limits)


def show(value: object) -> str:
    """A value as it is typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value)) if abs(value) < 1e15 else str(value)
    if isinstance(value, list):
        return f"[{','.join(show(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    return str(value)


def as_number(value: object) -> int | float | None:
    """The number that a text is, None for other texts and values."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value) if isinstance(value, str) else None
    return None


def enumerate_words(words: list[str], conjunction: str) -> str:
    """["a", "b", "c"] -> "a, b or c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {conjunction} {words[-1]}"
