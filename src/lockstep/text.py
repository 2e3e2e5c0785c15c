"""Values, differences and tables as plain text."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any


def show(value: object) -> str:
    """A value on one line, as it is typed on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return "".join(character if character.isprintable() else " " for character in text)


def first_line(error: BaseException) -> str:
    """Of an error's words; its type's name if it has none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def differing(a: Mapping[str, Any], b: Mapping[str, Any], missing: Any = None) -> dict[str, tuple[Any, Any]]:
    """{key: (value in a, value in b)}, sorted, where they differ. missing: stands for a value that is not there."""
    keys = [key for key in sorted({*a, *b}) if key not in a or key not in b or a[key] != b[key]]
    return {key: (a.get(key, missing), b.get(key, missing)) for key in keys}


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table with two blanks between its columns. right: the columns of numbers, by their places."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if place in right else "<" for place in range(len(widths))]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [form.format(*cells).rstrip() for cells in rows]
