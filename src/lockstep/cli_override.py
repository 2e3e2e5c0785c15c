"""A typed word that Hydra cannot read, as one sentence. No torch here."""

import os

from hydra.errors import OverrideParseException

from lockstep.config.schema import default_of, find_rule
from lockstep.errors import path_word

LEXER = "LexerNoViableAltException: "  # then the word, and a line with ^ below the character


def unreadable_override(error: OverrideParseException) -> str:
    """The sentence for `key=value` that is not in Hydra's grammar: the reason, and the word with quotes."""
    typed = str(error.override)
    key, _, value = typed.partition("=")
    sentence = f"{typed} cannot be read ({_reason(str(error.message), typed)})"
    if _has_open_bracket(value):
        return f"{sentence}; type {key}=<value>, with every bracket and quote closed"
    rule = find_rule(key.lstrip("+"))
    if rule is not None and str not in rule.kinds and "${" not in value:  # quotes would make it text
        return f"{sentence}; type {rule.what_to_type(key, default=default_of(key))}"
    return f"{sentence}; type {path_word(key, os.path.expanduser(value))}"  # quotes would keep a ~ as it is


def _has_open_bracket(value: str) -> bool:
    pairs = (("(", ")"), ("[", "]"), ("{", "}"))
    return any(value.count(begin) != value.count(end) for begin, end in pairs) or value.count('"') % 2 == 1


def _reason(message: str, typed: str) -> str:
    lines = [line for line in message.splitlines() if not line.startswith(("See ", "Error parsing override"))]
    if not lines:
        return "it is not in Hydra's grammar"
    if lines[0].startswith(LEXER):
        place = lines[1].find("^") - len(LEXER) if len(lines) > 1 else -1
        return f"{typed[place]} wants quotes" if 0 <= place < len(typed) else "a character wants quotes"
    return lines[0].partition(" expecting ")[0].strip()
