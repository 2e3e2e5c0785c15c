"""Every override in README and docs, of commands and of code spans, composes and has an accepted value."""

import re
import shlex
from dataclasses import replace

import pytest
import yaml

from lockstep.config.check import OPTIONS, check_nodes
from lockstep.config.schema import CONF
from support.configs import NEEDS, composed
from support.pages import PAGES, PLACEHOLDER, code_spans, command_lines

OVERRIDE = re.compile(r"[+~]*[\w/.@]+=\S+")
# key=value, and no key of this config: of Python, torchrun or Slurm.
FOREIGN_KEYS = {"weights_only", "is_host", "AuthInfo"}
# What this machine lacks: another one's network interface, and a plugin of Hydra.
NOT_HERE = ("model=mine", "backend.socket_ifname=", "hydra.")


def in_commands(page):
    """The overrides of every command. Those with --config-dir are run by test_parts.py."""
    found = set()
    for line in command_lines(page) + code_spans(page):
        if "src/train.py" in line and "--config-dir" not in line:
            typed = re.split(r"[;&|]|^'", line.partition("src/train.py")[2])[0]  # "'" ends the command of bash -c
            words = shlex.split(typed, comments=True)
            found.add(tuple(first_value(word) if "-m" in words else word for word in words if OVERRIDE.fullmatch(word)))
    return found


def first_value(word):
    """lr=0.1,0.2 -> lr=0.1, and lr=tag(log,interval(0.1,1)) -> lr=0.1."""
    key, _, values = word.partition("=")
    return f"{key}={values.rpartition('(')[2].partition(',')[0]}"


def in_code_spans(page):
    """The overrides of every code span that holds nothing else."""
    spans = [span.split() for span in code_spans(page)]
    return {tuple(words) for words in spans if all(OVERRIDE.fullmatch(word) for word in words)}


def usable(overrides):
    """Without placeholders, environment variables and keys of other programs."""
    words = [word for word in overrides if not PLACEHOLDER.search(word) and not word.startswith(NOT_HERE)]
    keys = [word.partition("=")[0] for word in words]
    return [word for word, key in zip(words, keys, strict=True) if key not in FOREIGN_KEYS and not key.isupper()]


def with_needed_options(overrides):
    """For `strategy.count=4` alone, the option that has this key comes first: strategy=virtual_ranks."""
    chosen, needed = {word.partition("=")[0] for word in overrides}, {}
    for word in overrides:
        group, _, name = word.partition("=")[0].partition(".")
        options = [option for option in OPTIONS.get(group, []) if name in written_in(group, option)]
        if name and options and group not in chosen:
            needed.setdefault(group, f"{group}={options[-1]}")
    words = [*needed.values(), *overrides]
    told = [need for word in words for need in NEEDS.get(word.lstrip("+"), [])]
    words += [word for word in told if word.partition("=")[0] not in chosen]
    names_data = any(word.startswith(("dataset=", "experiment=", "+experiment=")) for word in words)
    return ["dataset=text", *words] if "model=gpt" in words and not names_data else words


def written_in(group, option):
    found = yaml.safe_load((CONF / group / f"{option}.yaml").read_text()) or {}
    return found.get(group, found)  # an option for the whole config has its own group in it


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_override_composes_and_is_accepted(page):
    for overrides in sorted(in_commands(page) | in_code_spans(page)):
        words = with_needed_options(usable(overrides))
        try:
            config = composed(*words, whole=False)
            if not any("_target_" in word for word in words):
                check_nodes(replace(config, dataset={}))
        except Exception as error:
            pytest.fail(f"{page.name}: {' '.join(overrides)}: {error}")
