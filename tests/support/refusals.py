"""What the command line answers to typed words, in this process: composed, checked, nothing started."""

from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep import cli
from lockstep.config.check import check, explain
from lockstep.config.schema import RunConfig
from lockstep.preflight import preflight_job
from support.configs import as_composed


def answer(*typed: str) -> str | None:
    """The sentence that `python src/train.py <typed>` is refused with, None if a training would start. With -m: of the
    first job that is refused. Hydra's own text below the sentence is left out."""
    try:
        for words in jobs(typed):
            preflight_job(check(as_composed("run_dir=.", *words), words))
    except Exception as error:
        sentence = explain(error, typed)
        if sentence is None:
            raise
        return sentence.partition("\n")[0]
    return None


def accepted(*typed: str) -> RunConfig:
    """The config of `python src/train.py <typed>`, which passes every check."""
    words = cli.with_overrides_of_run(list(typed))
    config = check(as_composed("run_dir=.", *words), words)
    preflight_job(config)
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
