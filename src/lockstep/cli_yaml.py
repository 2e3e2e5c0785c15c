"""A config file that is no YAML, as one sentence. No torch here."""

import yaml  # type: ignore[import-untyped]

# A word of the parser's message, and what to type.
ADVICE = (
    ("\\t", "spaces instead of the tab"),
    ("duplicate key", "each key once"),
    ("flow", "the missing comma or bracket, such as {key: value} or [first, second]"),
    ("quoted scalar", "the missing quote"),
    ("special characters", "the file again without that character"),
)
ANY_ADVICE = "one `key: value` a line, keys of one level below each other, and quotes around special characters"


def unreadable_yaml(error: yaml.YAMLError) -> str:
    """The sentence for a file that cannot be parsed: file, line, problem and what to type."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        place, problem = getattr(error, "name", "a config file"), getattr(error, "reason", str(error))
    else:
        place = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1},"
        problem = ", ".join(filter(None, [getattr(error, "context", None), getattr(error, "problem", None)]))
    advice = next((typed for word, typed in ADVICE if word in problem), ANY_ADVICE)
    return f"{place} is no YAML ({problem}); type {advice}"
