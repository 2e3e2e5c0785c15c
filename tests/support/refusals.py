"""What the command line answers to typed words, in this process: composed, checked, nothing started."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from lockstep import cli
from lockstep.cli import prepare_arguments
from lockstep.config.check import check_arguments, check_config
from lockstep.config.targets import instantiate_as
from lockstep.hydra_errors import as_config_error
from lockstep.launchers.base import Launcher
from lockstep.preflight import preflight
from support.configs import composed

COMMANDS = ("python", "pip", "the")  # first words of advice that is no override


def answer(*typed: str) -> str | None:
    """The sentence that `python src/train.py <typed>` is refused with, None if a training would start."""
    words = list(typed)
    try:
        words = prepare_arguments(["train.py", *words])[1:]
        _check(composed(*words))
    except Exception as error:
        sentence = as_config_error(error, words)
        if sentence is None:
            raise
        return str(sentence)
    return None


def accepted(*typed: str) -> Any:
    """The config of `python src/train.py <typed>`, which passes every check."""
    cfg = composed(*prepare_arguments(["train.py", *typed])[1:])
    _check(cfg)
    return cfg


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


def _check(cfg: Any) -> None:
    """The checks of train.py's `main`, in its order."""
    values = cli.resolve(cfg)
    check_config(values)
    cfg = OmegaConf.create(values)
    check_arguments(cfg, ("launch",))
    preflight(cfg, instantiate_as(Launcher, cfg.launch, "launch"))
