"""Parameters that a pattern names, such as `bias`, `norm`, `layer1` or `blocks.*.attn`."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lockstep.errors import ConfigError


def matching_parameters(model: nn.Module, pattern: str) -> set[str]:
    """The names of the parameters that `pattern` names.

    bias: those whose last name is bias. norm: those of a normalisation layer (its class has Norm in its name). Any
    other pattern is compared with the parameter's name and with the names of the modules that hold it, by the rules of
    fnmatch: `layer1` is all of layer1, `*.weight` every weight.
    """
    found = set()
    for owner_name, owner in model.named_modules():
        for last, _ in owner.named_parameters(recurse=False):
            name = f"{owner_name}.{last}" if owner_name else last
            if pattern == "bias":
                is_match = last == "bias"
            elif pattern == "norm":
                is_match = "Norm" in type(owner).__name__
            else:
                is_match = any(fnmatchcase(candidate, pattern) for candidate in _with_modules(name))
            if is_match:
                found.add(name)
    return found


def require_matches(key: str, patterns: Sequence[str], matched: Iterable[bool], names: Iterable[str]) -> None:
    """Raise ConfigError for the first of `patterns` that matched no parameter. names: of all parameters."""
    for pattern, has_match in zip(patterns, matched, strict=True):
        if has_match or pattern in ("bias", "norm"):
            continue
        known = list(dict.fromkeys(candidate for name in names for candidate in _with_modules(name)))
        near = difflib.get_close_matches(pattern, known, 3, 0.4) or known[:3]
        raise ConfigError(
            f"{key}: the model has no {pattern}; the nearest names are {', '.join(near)}; type one of these"
        )


def _with_modules(name: str) -> Iterator[str]:
    """ "a.b.weight" -> "a", "a.b", "a.b.weight"."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])
