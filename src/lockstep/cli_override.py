"""A typed word that Hydra cannot read, as one sentence. No torch here."""

import os
import re
import shlex

from hydra.errors import OverrideParseException

LEXER = "LexerNoViableAltException: "  # then the word, and a line with ^ below the character


def unreadable_override(error: OverrideParseException) -> str:
    """The sentence for `key=value` that is not in Hydra's grammar: the reason, and the word with quotes."""
    typed = str(error.override)
    key, _, value = typed.partition("=")
    sentence = f"{typed} cannot be read ({_reason(str(error.message), typed)})"
    if re.match(r"[\[{'\"]|\w+\(", value):  # quotes around all of it would make it text
        return f"{sentence}; type {key}=<value>, with every bracket and quote closed"
    return f"{sentence}; type {in_quotes(key, os.path.expanduser(value))}"  # quotes would keep a ~ as it is


def in_quotes(key: str, value: str) -> str:
    """key=value as it is typed in a shell, with a value of any characters."""
    if "'" in value:
        return shlex.quote(f"{key}=" + _quoted(value, "'"))
    return f"'{key}=" + _quoted(value, '"') + "'"


def _quoted(value: str, quote: str) -> str:
    """As Hydra reads it: a backslash is special before a quote and at the end, and nowhere else."""
    escaped = re.sub(rf"(\\*)({quote}|\Z)", lambda found: found[1] * 2 + found[2].replace(quote, f"\\{quote}"), value)
    return f"{quote}{escaped}{quote}"


def _reason(message: str, typed: str) -> str:
    lines = [line for line in message.splitlines() if not line.startswith(("See ", "Error parsing override"))]
    if not lines:
        return "it is not in Hydra's grammar"
    if lines[0].startswith(LEXER):
        place = lines[1].find("^") - len(LEXER) if len(lines) > 1 else -1
        return f"{typed[place]} wants quotes" if 0 <= place < len(typed) else "a character wants quotes"
    return lines[0].strip()
