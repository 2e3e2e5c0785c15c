"""What the command line answers to typed words, in this process: composed, checked, nothing started."""

from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep import cli
from lockstep.build import build_parts
from lockstep.config.check import check_nodes, explain, instantiate_as
from lockstep.data.build import prepare_first
from lockstep.errors import ConfigError
from lockstep.launchers.base import Launcher
from lockstep.modes.base import Mode
from support.configs import composed


def answer(*typed):
    """The sentence that `python src/train.py <typed>` is refused with, and a library's own text below it. None if a
    training would start. With -m: of the first job that is refused."""
    try:
        for words in jobs(typed):
            accepted(*words)
    except Exception as error:
        sentence = str(error) if isinstance(error, ConfigError) else explain(error, typed)
        if sentence is None:
            raise
        return f"lockstep: {sentence}"
    return None


def accepted(*typed):
    """The config of `python src/train.py <typed>`, which passes every check of `main`, in its order."""
    config = composed(*cli.with_overrides_of_run(list(typed)), whole=False)
    check_nodes(config.launch, "launch")
    check_nodes(config.mode, "mode")
    launcher, mode = instantiate_as(Launcher, config.launch, "launch"), instantiate_as(Mode, config.mode, "mode")
    build_parts(config, launcher, mode)
    if launcher.starts_processes:
        prepare_first(config)
    return config


def jobs(typed):
    """The words of each job: those of the command itself without -m. A --config-dir is searched, as Hydra does."""
    words = [
        f"hydra.searchpath=[file://{word.partition('=')[2]}]" if word.startswith("--config-dir=") else word
        for word in typed
    ]
    if "-m" not in words:
        return [words]
    sweep = OverridesParser.create().parse_overrides([word for word in words if word != "-m"])
    lists = [one for one in sweep if one.is_sweep_override()]
    fixed = [str(one.input_line) for one in sweep if one not in lists]
    return [[*fixed, f"{one.get_key_element()}={value}"] for one in lists for value in one.sweep_string_iterator()]
