"""What the command line answers to typed words, in this process: composed, checked, nothing started."""

import re
import shlex
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep import cli
from lockstep.config.check import explain
from lockstep.config.nodes import check_nodes, instantiate_as
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.launchers.base import CalledHere, Launcher
from lockstep.modes.base import Mode
from lockstep.preflight import build_parts, check_place
from support.configs import composed

COMMANDS = ("python", "pip", "the")  # first words of advice that is no override


def answer(*typed: str) -> str | None:
    """The sentence that `python src/train.py <typed>` is refused with, None if a training would start. With -m: of the
    first job that is refused. Hydra's own text below the sentence is left out."""
    try:
        for words in jobs(typed):
            _passed(words)
    except Exception as error:
        sentence = str(error) if isinstance(error, ConfigError) else explain(error, typed)
        if sentence is None:
            raise
        return "lockstep: " + sentence.partition("\n")[0]
    return None


def accepted(*typed: str) -> RunConfig:
    """The config of `python src/train.py <typed>`, which passes every check of `main`, in its order."""
    return _passed(cli.with_overrides_of_run(list(typed)))


def _passed(words: Sequence[str]) -> RunConfig:
    config = composed(*words, whole=False)
    for group in ("launch", "mode"):
        check_nodes(group, getattr(config, group))
    launcher, mode = instantiate_as(Launcher, config.launch, "launch"), instantiate_as(Mode, config.mode, "mode")
    build_parts(config, CalledHere(launcher) if mode.starts_ranks else launcher, mode)
    if not mode.starts_ranks:
        check_place(config, launcher)
    return config


def jobs(typed: tuple[str, ...]) -> list[list[str]]:
    """The words of each job: those of the command itself without -m."""
    words = [
        f"hydra.searchpath=[file://{word.partition('=')[2]}]" if word.startswith("--config-dir=") else word
        for word in cli.with_overrides_of_run(list(typed))
    ]
    if "-m" not in words:
        return [words]
    sweep = OverridesParser.create().parse_overrides([word for word in words if word != "-m"])
    lists = [one for one in sweep if one.is_sweep_override()]
    fixed = [str(one.input_line) for one in sweep if one not in lists]
    return [[*fixed, f"{one.get_key_element()}={value}"] for one in lists for value in one.sweep_string_iterator()]


def assert_advice_helps(kept: Sequence[str], sentence: str) -> None:
    """The sentence ends in `type ...`, and a command of the `kept` words with this advice is accepted.

    Advice replaces kept words with the same key. Advice with a <placeholder>, or other than overrides, is not tried.
    """
    assert " type " in sentence, sentence
    text = re.split(r",? or | if | on each", sentence.rpartition(" type ")[2])[0]
    if "<" in text or text.split()[0] in COMMANDS:
        return
    advice = shlex.split(text)
    if any(not re.match(r"[+~]*[a-z_][\w./]*(=|$)", word) for word in advice):
        return
    replaced = {_key(word) for word in advice}
    words = [word for word in kept if _key(word) not in replaced]
    assert answer(*words, *advice) is None, [*words, *advice]


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
