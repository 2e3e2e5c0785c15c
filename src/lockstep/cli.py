"""The command line: the words typed, resolvers of the config, errors as sentences, exit codes, and the entry.

No torch here: `--help` imports this. From the top: what ends a command, what is checked of its config, the resolvers,
and at the end the words, as they are made ready for Hydra.
"""

import gc
import json
import math
import os
import re
import shlex
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from string import Template
from typing import Any, NoReturn, cast

import hydra
import yaml  # type: ignore[import-untyped]
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lockstep.compat import hydra_version_base, register_resolver
from lockstep.config.check import (
    NEEDED_GROUPS,
    as_declared,
    check_config,
    check_unread_overrides,
    with_whole_folders,
)
from lockstep.config.schema import CONF, GROUPS, SECTIONS, Node, find_rule, flatten
from lockstep.config.suggest import closest, no_option, removed_key, replacement, without_package
from lockstep.config.targets import RECORD, check_targets, chooses_foreign_target, refuse_foreign_record
from lockstep.distributed.environment import RankInfo, node_rank_info, read_rank_info
from lockstep.distributed.host import ENDS_WITH_PARENT, end_with_parent, remove_temporary_folder
from lockstep.distributed.rendezvous import STORE_TIMEOUT
from lockstep.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_FINISHED,
    RAISED_BY_ALL,
    ConfigError,
    RankFailed,
    StoppedEarly,
    exit_code_of,
    kind_of,
    path_value,
    without_quotes,
)
from lockstep.failures.causes import LOST_RANK
from lockstep.failures.record import is_communication_error
from lockstep.hydra_errors import (
    as_config_error,
    chosen_options,
    compose_typed,
    composed_keys,
    config_folders,
    find_cause,
    missing_value,
    search_path,
    typed_value,
)
from lockstep.launchers.base import flush_output, print_line
from lockstep.launchers.slurm import config_flags
from lockstep.runs.record import RUNNING, read_run, state_of

HELP_FLAGS = {"--help", "-h"}
TEXT_FLAGS = {*HELP_FLAGS, "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
MULTIRUN_FLAGS = {"--multirun", "-m"}
STARTERS = ("torchrun", "srun", "mpirun")  # programs that live as long as the ranks that they start
FLAGS_WITH_VALUE = {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"}
FLAGS_WITH_VALUE |= {"--config-dir", "-cd", "--experimental-rerun"}
GROUPS_OF_ONE = (*NEEDED_GROUPS, "backend", "sync_bn")
SWITCHES = {"true": "on", "false": "off", "1": "on", "0": "off", "yes": "on", "no": "off"}
OPTUNA = "optuna"
HYDRA_FLAGS = "python src/train.py --hydra-help to see the flags"
MODES = ("run", "multirun", "cfg", "info", "shell_completion")  # of Hydra, which does one of them
OWN_SWEEPERS = ("lockstep", "basic")  # they draw nothing at random
TRAIN, CHECK, FIND_LR = "train", "check", "find_lr"
# Where and how a run computed, and what it wrote: another command says that itself. The numbers do not depend on it.
NOT_TAKEN: tuple[str, ...] = ("resume", "mode", "launch", "logger", "sweep", "hydra", "run_dir")
NOT_TAKEN += ("backend", "strategy", "gradient_sync", "sync_bn", "profiler", "snapshot", "trainer.compile")
NOT_TAKEN += ("trainer.digest", "watch.nan")  # they are refused with some strategies
NORMALISATION = ("dataset.mean", "dataset.std")
CLASS_NAMES = "dataset.class_names"
VALUES_OF_RUN = ("dataset", "model", "task", "trainer")  # the parts of a config that say what a net computes
# What a run may be trained on without: it ended the run, or changes no number.
NOT_NEEDED: tuple[str, ...] = ("trainer.max_steps", "trainer.pause_after", "trainer.digest", "evaluation.patience")
NOT_NEEDED += ("logging", "watch", "backend", "data_dir")


def run_main(main: Callable[[], Any]) -> None:
    """Run a hydra.main function, show its error as a sentence if the input caused it, and end the process.

    Never returns. The exit codes are those of `lockstep.errors`, and 130 for Ctrl-C.
    """
    if sys.platform == "win32":
        print("lockstep: Windows is not supported; type wsl --install, and run the command in WSL 2", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    if sys.version_info >= (3, 14) and hydra.__version__.startswith("1.3."):  # its flags have a help text of no string
        print("lockstep: Python 3.14 needs Hydra 1.4; type pip install --pre 'hydra-core>=1.4.0rc3'", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    # What is written to a stream that was closed at the start (`>&-`) is dropped, also in processes started here. Else
    # the next file that is opened would get the stream's number, and with it what a library prints.
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  (it stays open) # at the lowest free number
            setattr(sys, name, stream)
            if stream.fileno() == number:
                os.set_inheritable(number, True)
    # Imports and configs create half a million objects that all stay. Searching them for garbage takes 0.2 s.
    gc.disable()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    code, error = end_of(lambda: _run(main))
    if error is not None and not isinstance(error, ConfigError):
        from lockstep.distributed.host import start_agent_watchdog

        start_agent_watchdog(os.environ)
    flush_output()
    remove_temporary_folder()
    # gloo's threads sometimes abort the interpreter while it exits, and torchrun would call a finished run failed.
    os._exit(code)


def end_of(run: Callable[[], int | None]) -> tuple[int, BaseException | None]:
    """Call `run`, and show its error. Returns the exit code and the error: a ConfigError if the input caused it."""
    try:
        return run() or EXIT_FINISHED, None
    except SystemExit as error:
        if isinstance(error.code, str):
            print_line(error.code, sys.stderr)
            return EXIT_FAILED, None
        return error.code or EXIT_FINISHED, None
    except (StoppedEarly, KeyboardInterrupt) as stopped:
        return exit_code_of(stopped), None
    except Exception as error:
        if isinstance(error, BrokenPipeError) and asks_for_text(sys.argv):  # `--help | head`
            return EXIT_FINISHED, None
        shown = as_config_error(error, sys.argv[1:]) or error
        if text := _text_of(shown):
            print_line(text, sys.stderr)
        return exit_code_of(shown), shown


def _text_of(error: Exception) -> str:
    """What is shown of an error that ends a command."""
    if isinstance(error, RankFailed):
        return str(error)  # empty if the monitor prints the report
    if isinstance(error, ConfigError) and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(1)  # rank 0 of this machine usually prints the same sentence, and the launcher then ends this rank
    if kind_of(error) in RAISED_BY_ALL:
        return f"lockstep: {error}"
    text = "".join(traceback.format_exception(error)).rstrip("\n")
    if is_communication_error(error) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        text += f"\nlockstep: {'; '.join(LOST_RANK)}"
    return text


class _RunFailed(BaseException):
    """Takes the error of a run past Hydra, which would print all overrides before an Exception."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def errors_are_shown_once() -> Iterator[None]:
    """Inside a hydra.main function: `run_main` shows the error of a run, and Hydra shows nothing of it."""
    try:
        yield
    except Exception as error:
        if HydraConfig.get().mode == RunMode.RUN:
            raise _RunFailed(error) from error
        raise  # of a job of a sweep, which is for the sweeper to show


def _run(main: Callable[[], Any]) -> int:
    from lockstep.distributed import signals
    from lockstep.distributed.rendezvous import forget_start

    info = read_rank_info()
    # Started by hand, its parent is a shell, which may end under nohup.
    if info.started_by in STARTERS or os.environ.pop(ENDS_WITH_PARENT, ""):
        end_with_parent()  # imports and the config take seconds, in which it may be killed
    register_resolvers()
    argv = with_trained_run(require_words_of_run(resume_sweep(sys.argv)))
    sys.argv = argv = refuse_sampling_sweep(prepare_arguments(argv), info)  # for Hydra
    if asks_for_text(argv):
        if not info.is_rank_zero:
            return EXIT_FINISHED
        if {word for word in argv[1:] if word.startswith("-")} <= HELP_FLAGS:
            print(help_text([word for word in argv[1:] if not word.startswith("-")]))
            return EXIT_FINISHED
    if info.world_size > 1:
        signals.listen()  # this rank may have to wait for others before its config is composed
    code, failure = EXIT_FINISHED, None
    try:
        if MULTIRUN_FLAGS & set(argv):
            from lockstep.sweeps.runner import run_command

            code = run_command(main)
        else:
            main()
    except _RunFailed as failed:
        failure = failed.error
    if failure is not None:
        raise failure
    signals.stop_listening()  # the run has finished
    forget_start(info)
    return code


def check_input(cfg: DictConfig) -> DictConfig:
    """cfg with every interpolation resolved. Raises ConfigError for what its values alone show to be wrong."""
    checked = OmegaConf.create(check_values(cfg))
    assert isinstance(checked, DictConfig)
    return checked


def check_values(cfg: DictConfig) -> Node:
    """The values of `check_input` as plain dicts and lists: a config of OmegaConf takes as long as all checks."""
    values = resolve(with_whole_folders(cfg, HydraConfig.get()))
    if values["sweep"]["preview"] and HydraConfig.get().mode == RunMode.RUN:
        raise ConfigError(
            "sweep.preview=true shows the jobs of a sweep, and this is one run; type -m sweep.preview=true"
        )
    check_config(values)
    check_unread_overrides(cfg, values, HydraConfig.get())
    check_targets(values, HydraConfig.get())
    return values


def resolve(cfg: DictConfig) -> Node:
    """The values of cfg, interpolations resolved, as declared. Raises ConfigError for a missing value."""
    try:
        return as_declared(cast(Node, OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)))
    except OmegaConfBaseException as error:
        if find_cause(error) is not None:
            raise
        raise missing_value(error) from None


def register_resolvers() -> None:
    """Register the resolvers of this project. Must run before a config is composed.

    `${started:format}` is the moment at which the run started, the same on all ranks. `${on_rank_zero:value,other}` is
    `value` on rank 0 and `other` on the other ranks. `${as_typed:words}` are words whose interpolations, such as
    ${oc.env:KEY}, are not resolved: %24 stands for $, and %25 for %. `${deciding_set:}` is val where a validation set
    is held out, else test.
    """

    def started(pattern: str, _root_: DictConfig) -> str:
        from lockstep.distributed.rendezvous import run_started_at

        seconds = OmegaConf.select(_root_, "backend.timeout")  # of a config that is not checked yet
        is_number = isinstance(seconds, int | float) and seconds > 0
        timeout = timedelta(seconds=seconds) if is_number else STORE_TIMEOUT
        is_run = not (asks_for_text(sys.argv) or OmegaConf.select(_root_, "sweep.preview"))
        return run_started_at(_composing_rank(_root_), claim=is_run, timeout=timeout).strftime(pattern)

    def as_typed(words: ListConfig) -> list[str]:
        typed = OmegaConf.to_container(words, resolve=False)
        assert isinstance(typed, list)
        return [str(word).replace("%", "%25").replace("$", "%24") for word in typed]

    def on_rank_zero(value: Any, other: Any = None, *, _root_: DictConfig) -> Any:
        return value if _composing_rank(_root_).is_rank_zero else other

    def deciding_set(*, _root_: DictConfig) -> str:
        held_out = [OmegaConf.select(_root_, f"dataset.{key}") for key in ("validation", "folds")]
        is_final = OmegaConf.select(_root_, "trainer.final") is not None
        return "test" if is_final or held_out == [None, None] else "val"

    register_resolver("as_typed", as_typed)
    register_resolver("deciding_set", deciding_set)
    register_resolver("started", started)
    register_resolver("on_rank_zero", on_rank_zero)


def _composing_rank(root: DictConfig) -> RankInfo:
    """This process among those that compose the config of this run.

    These are the ranks that another program has started, or with launch=spawn on several nodes one process on each.
    """
    launch: Any = root.get("launch")
    nnodes = launch.get("nnodes") if isinstance(launch, DictConfig) else None
    if isinstance(nnodes, int) and nnodes > 1:
        return node_rank_info(nnodes, launch.node_rank, launch.master_addr, launch.master_port)
    return read_rank_info()


def help_text(overrides: list[str]) -> str:
    """What --help prints: conf/hydra/help/lockstep.yaml, filled in. Hydra 1.3 takes twice as long to fill it in."""
    folders = [folder for folder in CONF.iterdir() if folder.is_dir() and folder.name != "hydra"]
    options = {folder.name: ", ".join(sorted(file.stem for file in folder.glob("*.yaml"))) for folder in folders}
    with initialize_config_dir(str(CONF), **hydra_version_base()):
        cfg = compose("config", overrides=overrides, return_hydra_config=True)
    template = Template(cfg.hydra.help.template)
    with open_dict(cfg):
        del cfg["hydra"]
    groups = "\n".join(f"{group}: {names}" for group, names in sorted(options.items()))
    return template.substitute(APP_CONFIG_GROUPS=groups + "\n", CONFIG=OmegaConf.to_yaml(cfg))


def collect_garbage() -> None:
    """Turn Python's garbage collector on again, and exclude what has been imported until now from its work."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def resume_sweep(argv: list[str]) -> list[str]:
    """The command with the words of the sweep that `sweep.resume=` names before what is typed, which wins.

    Raises ConfigError for a folder that is not the folder of a sweep, and for what only its user may type: the record
    may be a stranger's.
    """
    typed = typed_value("sweep.resume", argv[1:])
    if typed is None or typed == "null":
        return argv
    if not MULTIRUN_FLAGS & set(argv[1:]):
        raise ConfigError(f"sweep.resume={typed} goes on with a sweep; type -m sweep.resume={typed}")
    from lockstep.sweeps.table import recorded_arguments

    overrides, flags = split([word for word in argv[1:] if not word.startswith("hydra.sweep.dir=")])
    keys = {word.partition("=")[0].lstrip("+") for word in overrides}
    folder = Path(without_quotes(typed))
    recorded = recorded_arguments(folder)
    _require_folders(folder, words_of_folders(recorded), argv[1:])
    before = [word for word in split(recorded)[0] if not word.startswith("hydra.searchpath=")]
    kept = [word for word in before if word.partition("=")[0].lstrip("+") not in keys]
    _require_open_targets(folder, kept)
    return [argv[0], *kept, *overrides, f"hydra.sweep.dir={typed}", *flags]


def require_words_of_run(argv: list[str]) -> list[str]:
    """The command. Raises ConfigError if it would train the run in its folder on without words that this was made with.

    The defaults would replace them. A folder without a snapshot is trained afresh, with any words.
    """
    typed = argv[1:]
    if MULTIRUN_FLAGS & set(typed) or typed_value("mode", typed) not in (None, TRAIN):
        return argv
    folder = Path(without_quotes(typed_value("hydra.run.dir", typed) or ""))
    try:
        goes_on = any(folder.glob("snapshots/step_*.pt")) and state_of(read_run(folder)) != RUNNING
    except ConfigError:  # no run.json
        goes_on = False
    if not goes_on:
        return argv
    left_out = _recorded_words(folder, typed)
    words = shlex.join(word for word in left_out if not _belongs_to(word, NOT_NEEDED))
    if words:
        raise ConfigError(
            f"{folder} holds a run of {words}; to train it on type {words} in this command, too, or "
            f"hydra.run.dir=<a new folder> for another run"
        )
    return argv


def with_trained_run(argv: list[str]) -> list[str]:
    """The command with the overrides of the run that `resume=` names before what is typed, which wins.

    Unchanged for mode=train and mode=find_lr. The log of the command goes to a folder of the mode inside the run
    folder, so that no new run folder is made; mode=check gets one that is removed. Raises ConfigError for a run without
    a record, and for what only its user may type.
    """
    typed = argv[1:]
    mode, resume = typed_value("mode", typed) or TRAIN, typed_value("resume", typed)
    if mode in (TRAIN, FIND_LR) or (mode != CHECK and resume in (None, "null")):
        return argv
    if MULTIRUN_FLAGS & set(typed):
        raise ConfigError(f"mode={mode} is no training, and a sweep trains; type the command without -m, run by run")
    if mode == CHECK:
        from multiprocessing.util import get_temp_dir

        folder = Path(get_temp_dir(), CHECK)  # Hydra makes a run folder before a config is checked; run_main removes it
        return argv if asks_for_text(argv) else [*argv, f"hydra.run.dir={path_value(folder)}"]
    folder = run_folder(without_quotes(str(resume)))
    recorded: list[str] = []
    with suppress(ConfigError):  # without a run.json nobody can tell
        run = read_run(folder)
        flags = [flag.partition("=")[::2] for flag in run["flags"]]
        recorded = [f"{name}={Path(run['cwd'], at) if name == '--config-dir' else at}" for name, at in flags]
    _require_folders(folder, recorded, typed)
    words = _recorded_words(folder, typed)
    _require_open_targets(folder, words)
    words += _values_of_run(folder, words, typed)
    if typed_value("hydra.run.dir", typed) is None:
        words.append(f"hydra.run.dir={path_value(folder / str(mode))}")
    return [argv[0], *words, *typed]


def run_folder(resume: str) -> Path:
    """The run folder of `resume`: a run folder, its snapshots/, or a file in one of them. Raises ConfigError."""
    path = Path(resume).expanduser()
    for folder in (path, path.parent, path.parent.parent):
        if (folder / RECORD / "overrides.yaml").is_file():
            return folder
    what = "is in no run folder" if path.exists() else "does not exist"
    raise ConfigError(f"resume={resume} {what}; type resume=<a run folder, with {RECORD}/ inside, or a snapshot in it>")


def _recorded_words(folder: Path, typed: list[str]) -> list[str]:
    """The overrides that composed the run, without those that `typed` replaces. Raises ConfigError without a record."""
    try:
        words = yaml.safe_load((folder / RECORD / "overrides.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{folder}/{RECORD}/overrides.yaml cannot be read ({reason}); type another folder") from None
    recorded = [str(word) for word in words or []]
    return [word for word in recorded if not _belongs_to(word, NOT_TAKEN) and not _is_replaced(word, typed)]


def _require_open_targets(folder: Path, words: list[str]) -> None:
    """Raise ConfigError for words of a record that may run anything: the record may be a stranger's."""
    for word in words:
        if chooses_foreign_target(word):
            typed = shlex.quote(word)
            raise ConfigError(
                f"{folder} was trained with {word}, which may run anything; if you trust it, type {typed}"
            )


def _is_replaced(word: str, typed: list[str]) -> bool:
    """Whether what is typed stands for `word`: the same key, or another option of its group."""
    groups = [name for name in map(_key, typed) if "." not in name]
    return _key(word) in map(_key, typed) or _belongs_to(word, groups)


def _belongs_to(word: str, names: list[str] | tuple[str, ...]) -> bool:
    """Whether `word` sets one of `names`, or what is below it."""
    return any(_key(word) == name or _key(word).startswith((f"{name}.", f"{name}/")) for name in names)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~").partition("@")[0]


def words_of_folders(words: Sequence[str]) -> list[str]:
    """Those of the typed words that say which folders of configs a config is composed from."""
    return [*config_flags(list(words)), *(word for word in words if word.startswith("hydra.searchpath="))]


def _require_folders(folder: Path, recorded: list[str], typed: list[str]) -> None:
    """Raise ConfigError if folders of configs are `recorded`, which may run anything, and none are typed."""
    if recorded and not words_of_folders(typed):
        words = shlex.join(recorded)
        raise ConfigError(f"{folder} was trained with {words}; type {words} with this command, too")


def _values_of_run(folder: Path, words: list[str], typed: list[str]) -> Iterator[str]:
    """The run's own values as words, where a YAML file, or one in conf/local, may say something else today.

    Plain values alone: a class or an interpolation of a stranger's record may run anything. What stands beside a
    `_target_` that was typed may be of the class that it replaced.
    """
    config, names = dict[str, Any](), list[str]()
    with suppress(OSError, yaml.YAMLError):
        config = yaml.safe_load((folder / RECORD / "config.yaml").read_text()) or {}
    with suppress(ConfigError):
        names = read_run(folder).get("classes", names)
    if config.get("init") is not None:  # the weights of the run are in its snapshots
        yield from ("init=null", "new_layers=[]")
    said = set(map(_key, [*words, *typed]))
    if config and "validation" not in (config.get("dataset") or {}) and not _is_replaced("dataset.validation", typed):
        yield "dataset.validation=null"  # an earlier version held nothing out
    replaced = {key.removesuffix("._target_") for key in said if key.endswith("._target_")}
    for key, value in flatten({name: config.get(name) or {} for name in VALUES_OF_RUN}).items():
        parent, _, name = key.rpartition(".")
        value = value or names if key == CLASS_NAMES else value
        is_open = key not in said and parent not in replaced and not _belongs_to(key, NOT_TAKEN)
        if not is_open or name.startswith("_") or not re.fullmatch(r"[\w.]+", key) or not _is_plain(value):
            continue
        # The net expects values that are normalised so, and its outputs are these classes.
        if key in (*NORMALISATION, CLASS_NAMES) or not _is_replaced(key, typed):
            yield f"++{key}={json.dumps(value, ensure_ascii=False)}"


def _is_plain(value: object) -> bool:
    """Whether Hydra reads the value as JSON writes it."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return value.isprintable() and not set(value) & set('$\\"')
    return value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def prepare_arguments(argv: list[str]) -> list[str]:
    """The command as Hydra reads it: overrides first, then flags, without what torch's old launcher adds.

    `+experiment=x` becomes `experiment=x`. Raises ConfigError for --experimental-rerun, for unknown flags, and for a
    run's record as a config folder if it contains what can run commands.
    """
    words = [word for word in argv[1:] if not word.startswith(("--local-rank=", "--local_rank="))]
    if any(word.partition("=")[0] == "--experimental-rerun" for word in words):
        raise ConfigError(
            "--experimental-rerun needs a pickled config, which these runs do not write; "
            "type hydra.run.dir=<the run's folder> and the overrides in its .hydra/overrides.yaml"
        )
    overrides, flags = split(words)
    _check_flags(flags, overrides, Path(argv[0]).parent)
    _check_overrides(overrides, words)
    return [argv[0], *(re.sub(r"^\+{1,2}experiment=", "experiment=", word) for word in overrides), *flags]


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """(overrides, flags). argparse refuses overrides on both sides of a flag such as `-m`."""
    overrides: list[str] = []
    flags: list[str] = []
    takes_value = False
    for word in words:
        if takes_value or word.startswith("-"):
            flags.append(word)
        elif flags and flags[-1] in ("--info", "-i") and not re.search(r"[=~]", word):
            flags.append(word)  # --info may have a value
        else:
            overrides.append(word)
        takes_value = not takes_value and word in FLAGS_WITH_VALUE
    return overrides, flags


class _Flags(ArgumentParser):
    """Hydra's flags, without its words. Raises ConfigError for any other, where argparse would print its usage."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        for flag, short in (("--help", "-h"), ("--run", "-r"), ("--multirun", "-m"), ("--shell-completion", "-sc")):
            self.add_argument(flag, short, action="store_true")
        for flag in ("--hydra-help", "--resolve"):
            self.add_argument(flag, action="store_true")
        for flag, short in (("path", "-cp"), ("name", "-cn"), ("dir", "-cd")):
            self.add_argument(f"--config-{flag}", short)
        self.add_argument("--package", "-p")
        self.add_argument("--version", action="store_true")
        self.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
        kinds = ("all", "aliases", "config", "defaults", "defaults-tree", "plugins", "searchpath")
        self.add_argument("--info", "-i", const="all", nargs="?", choices=kinds)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; type {HYDRA_FLAGS}")


def _check_flags(flags: list[str], overrides: list[str], script_folder: Path) -> None:
    """Raise ConfigError for flags that are not Hydra's, or exclude others, or would be ignored or find nothing."""
    parsed, unknown = _Flags().parse_known_args(flags)
    for flag in unknown:  # such as a key with dashes
        key, equals, value = flag.lstrip("-").replace("-", "_").partition("=")
        typed = value if equals else next((word for word in overrides if "=" not in word), None)
        instead = replacement(key, typed, composed_keys(overrides), chosen_options(overrides))
        raise ConfigError(f"{flag} is no flag; type {instead or HYDRA_FLAGS}")
    first, *others = [f"--{mode.replace('_', '-')}" for mode in MODES if getattr(parsed, mode)] or [""]
    if others:
        raise ConfigError(f"{first} and {' and '.join(others)} exclude each other; type the command with one of them")
    package, cfg = parsed.package, parsed.cfg
    if package is not None:
        if not cfg:
            raise ConfigError(f"--package={package} is a part of what --cfg prints; type --cfg job --package={package}")
        if find_rule(package) is not None:
            raise ConfigError(f"--package={package} is a value, and no section; type --cfg {cfg} to see it")
        sections = {*SECTIONS, *GROUPS_OF_ONE, "logger", "hydra"}
        section = package.partition(".")[0]
        meant = None if section in sections else closest(section, sections)
        if meant is not None:
            raise ConfigError(f"--package={package} is no section; type --cfg {cfg} --package={meant}")
    # Hydra reads --config-path from the folder of src/train.py.
    for name, base, typed in (("dir", Path(), parsed.config_dir), ("path", script_folder, parsed.config_path)):
        if typed is not None and not typed.startswith("pkg://"):
            folder = base / typed.removeprefix("file://")
            if not folder.is_dir():
                raise ConfigError(f"--config-{name}={typed} is no folder; type --config-{name}=<a folder of configs>")
            refuse_foreign_record(folder, parsed.config_name or "config")


def _check_overrides(overrides: list[str], words: list[str]) -> None:
    """Raise ConfigError for overrides that Hydra would leave out, take apart or misread. words: with the flags."""
    for path in search_path(overrides):
        if "://" not in path and "${" not in path and not Path(path).is_dir():  # Hydra would leave it out
            raise ConfigError(f"{path} in hydra.searchpath is no folder; type --config-dir=<a folder of configs>")
    # A shell takes `key = value` apart.
    for before, word, after in zip(["", *overrides], overrides, [*overrides[1:], ""], strict=False):
        if not word.partition("=")[0].strip("+~"):
            key, value = before.removesuffix("="), word.removeprefix("=") or after
            instead = f"{key}={value}" if key and value else "<key>=<value>"
            raise ConfigError(f"{word} has no key; type {instead}")
        if word.endswith("=") and after and not {"=", "~"} & set(after):
            raise ConfigError(f"{word} {after} has a space; type {word}{after}")
    # A preset, or a file with the values of this machine, changes nothing without its package.
    names = [name for word in overrides if _key(word) == "experiment" for name in word.partition("=")[2].split(",")]
    for folder in config_folders(words):
        for name in [*(f"experiment/{name}" for name in names), "local/default"]:
            file = folder / f"{name}.yaml"
            text = file.read_text(errors="replace") if file.is_file() else ""
            if re.search(r"^[^#\s]", text, re.MULTILINE) and "@package" not in text:
                raise ConfigError(without_package(name.partition("/")[0]))
    for word in overrides:
        _check_group_override(word)


def _check_group_override(word: str) -> None:
    """Raise ConfigError for a value of a config group that Hydra does not take for the name of one option."""
    key, _, option = word.partition("=")
    group, plain = key.lstrip("+"), option.lower()
    if group == "experiment" and plain == "null":
        raise ConfigError("experiment=null is no option; type the command without it")
    if group not in (*GROUPS_OF_ONE, "logger"):
        return
    if group != key != "+logger" and option:
        instead = f"+logger={option}" if group == "logger" else f"{group}={option}"
        raise ConfigError(f"{group} is a config group, which {key} cannot add; type {instead}")
    if plain in ("null", "none"):
        raise ConfigError(removed_key(group))
    several = re.fullmatch(r"\[(.*,.*)\]", option)
    if several and group != "logger":
        names = several[1].replace(" ", "")
        raise ConfigError(
            f"{group}={option} chooses several options, and a run has one; "
            f"type {group}={names.partition(',')[0]}, or for a sweep -m {group}={names}"
        )
    if group == "sync_bn" and plain in SWITCHES:
        raise ConfigError(f"sync_bn={option} is no option; type sync_bn={SWITCHES[plain]}")
    if plain in SWITCHES or re.fullmatch(r"-?[\d.]+", plain):
        raise ConfigError(no_option(group, option, GROUPS[group]))


def asks_for_text(argv: list[str]) -> bool:
    """Whether the command only prints something, such as --help."""
    return any(word.partition("=")[0] in TEXT_FLAGS for word in argv[1:])


def refuse_foreign_launcher(name: str | None) -> None:
    """Raise ConfigError for a launcher of Hydra's, such as joblib. name: of the launcher that was chosen, if any."""
    if name not in (None, "lockstep"):
        raise ConfigError(
            f"hydra/launcher={name} cannot run these jobs; leave it out, and for several jobs at once type "
            f"sweep.slots=2, or for jobs on a cluster launch=slurm"
        )


def refuse_sampling_sweep(argv: list[str], info: RankInfo) -> list[str]:
    """Check a sweep's sweeper and launcher. Returns the command, for Optuna with the direction of the objective.

    Raises ConfigError for another launcher of Hydra's than this project's, and for a sweeper that draws values at
    random inside a world of several ranks: every rank would draw its own.
    """
    refuse_foreign_launcher(typed_value("hydra/launcher", argv[1:]))
    if not MULTIRUN_FLAGS & set(argv[1:]):
        return argv
    sweeper = typed_value("hydra/sweeper", argv[1:]) or OWN_SWEEPERS[0]
    if sweeper not in OWN_SWEEPERS and info.world_size > 1:
        raise ConfigError(
            f"hydra/sweeper={sweeper} would draw other values on every rank; "
            f"type python src/train.py -m launch=torchrun hydra/sweeper={sweeper} ..."
        )
    if sweeper != OPTUNA or typed_value("hydra.sweeper.direction", argv[1:]) is not None:
        return argv
    cfg: Any = compose_typed(argv[1:])
    if cfg is None:
        return argv
    direction = cfg.hydra.sweeper.get("direction", "minimize")
    mode = cfg.task.metrics.get(str(cfg.objective).partition("/")[2])
    names = {"min": "minimize", "max": "maximize"}
    # A config that asks for another than the default stays. Optuna's plugin has an Enum.
    if getattr(direction, "name", direction) != "minimize" or mode not in names:
        return argv
    return [argv[0], f"hydra.sweeper.direction={names[mode]}", *argv[1:]]
