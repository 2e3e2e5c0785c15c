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
    """The lines of a table with two blanks between its columns. The last column is not padded.

    rows: each with the same number of cells, a header first if there is one. right: the columns whose cells are
    aligned at their right end, as numbers are.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in rows
    ]
