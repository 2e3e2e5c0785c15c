"""The command line: resolvers of the config, errors as sentences, exit codes. No torch: `--help` imports this."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from string import Template
from typing import Any, cast

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lockstep.cli_arguments import (
    HELP_FLAGS,
    MULTIRUN_FLAGS,
    asks_for_text,
    prepare_arguments,
    refuse_sampling_sweep,
    resume_sweep,
)
from lockstep.cli_errors import as_config_error, find_cause, missing_value
from lockstep.cli_libraries import load_libraries
from lockstep.cli_modes import require_words_of_finished_run, with_trained_run
from lockstep.cli_report import exit_code, show_error
from lockstep.config.check import as_declared, check_config, check_unread_overrides, with_whole_folders
from lockstep.config.schema import CONF, Node
from lockstep.config.targets import check_targets
from lockstep.distributed.environment import RankInfo, node_rank_info, read_rank_info
from lockstep.distributed.host import remove_temporary_folder
from lockstep.distributed.rendezvous import STORE_TIMEOUT
from lockstep.errors import (
    EXIT_CONFIG,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    ConfigError,
    StoppedEarly,
)
from lockstep.launchers.base import flush_output
from lockstep.launchers.env import end_with_starter


def register_resolvers() -> None:
    """Register the resolvers of this project. Must run before a config is composed.

    `${started:format}` is the moment at which the run started, the same on all ranks. `${on_rank_zero:value,other}` is
    `value` on rank 0 and `other` on the other ranks. `${as_typed:words}` are words whose interpolations, such as
    ${oc.env:KEY}, are not resolved: %24 stands for $, and %25 for %.
    """

    def started(pattern: str, _root_: DictConfig) -> str:
        from lockstep.distributed.rendezvous import run_started_at

        is_run = not asks_for_text(sys.argv)
        timeout = _rendezvous_timeout(_root_)
        return run_started_at(_composing_rank(_root_), claim=is_run, timeout=timeout).strftime(pattern)

    def as_typed(words: ListConfig) -> list[str]:
        typed = OmegaConf.to_container(words, resolve=False)
        assert isinstance(typed, list)
        return [str(word).replace("%", "%25").replace("$", "%24") for word in typed]

    def on_rank_zero(value: Any, other: Any = None, *, _root_: DictConfig) -> Any:
        return value if _composing_rank(_root_).is_rank_zero else other

    OmegaConf.register_new_resolver("as_typed", as_typed, replace=True)
    OmegaConf.register_new_resolver("started", started, replace=True)
    OmegaConf.register_new_resolver("on_rank_zero", on_rank_zero, replace=True)


def _composing_rank(root: DictConfig) -> RankInfo:
    """This process among those that compose the config of this run.

    These are the ranks that another program has started, or with launch=spawn on several nodes one process on each.
    """
    launch: Any = root.get("launch")
    nnodes = launch.get("nnodes") if isinstance(launch, DictConfig) else None
    if isinstance(nnodes, int) and nnodes > 1:
        return node_rank_info(nnodes, launch.node_rank, launch.master_addr, launch.master_port)
    return read_rank_info()


def _rendezvous_timeout(root: DictConfig) -> timedelta:
    """`backend.timeout` of a config that is not checked yet."""
    seconds = OmegaConf.select(root, "backend.timeout")
    return timedelta(seconds=seconds) if isinstance(seconds, int | float) and seconds > 0 else STORE_TIMEOUT


def check_input(cfg: DictConfig) -> DictConfig:
    """cfg with every interpolation resolved. Raises ConfigError for what its values alone show to be wrong."""
    checked = OmegaConf.create(check_values(cfg))
    assert isinstance(checked, DictConfig)
    return checked


def check_values(cfg: DictConfig) -> Node:
    """The values of `check_input` as plain dicts and lists: a config of OmegaConf takes as long as all checks."""
    values = resolve(with_whole_folders(cfg, HydraConfig.get()))
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


def help_text(overrides: list[str]) -> str:
    """What --help prints: conf/hydra/help/lockstep.yaml, filled in. Hydra 1.3 takes twice as long to fill it in."""
    folders = [folder for folder in CONF.iterdir() if folder.is_dir() and folder.name != "hydra"]
    options = {folder.name: ", ".join(sorted(file.stem for file in folder.glob("*.yaml"))) for folder in folders}
    with initialize_config_dir(str(CONF), version_base="1.3"):
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
    _replace_closed_streams()
    # Imports and configs create half a million objects that all stay. Searching them for garbage takes 0.2 s.
    gc.disable()
    _prepare_environment()
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
        show_error(error)
        return exit_code(error), None
    except StoppedEarly as stopped:
        return stopped.code, None
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED, None
    except Exception as error:
        if isinstance(error, BrokenPipeError) and asks_for_text(sys.argv):  # `--help | head`
            return EXIT_FINISHED, None
        shown = as_config_error(error, sys.argv[1:]) or error
        show_error(shown)
        return exit_code(shown), shown


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


def _replace_closed_streams() -> None:
    """What is written to a stream that was closed at the start (`>&-`) is dropped, here and in processes started here.

    Otherwise the next file that is opened would get the stream's number, and with it what a library prints.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  (it stays open) # at the lowest free number
            setattr(sys, name, stream)
            if stream.fileno() == number:
                os.set_inheritable(number, True)


def _run(main: Callable[[], Any]) -> int:
    from lockstep.distributed import signals
    from lockstep.distributed.rendezvous import forget_start

    sys.argv = with_trained_run(require_words_of_finished_run(resume_sweep(sys.argv)))
    sys.argv = prepare_arguments(sys.argv)
    info = read_rank_info()
    end_with_starter()  # imports and the config take seconds, in which it may be killed
    register_resolvers()
    if asks_for_text(sys.argv):
        if not info.is_rank_zero:
            return EXIT_FINISHED
        if {word for word in sys.argv[1:] if word.startswith("-")} <= HELP_FLAGS:
            print(help_text([word for word in sys.argv[1:] if not word.startswith("-")]))
            return EXIT_FINISHED
    else:
        load_libraries()
    if info.world_size > 1:
        signals.listen()  # this rank may have to wait for others before its config is composed
    sys.argv = refuse_sampling_sweep(sys.argv, info)
    code, failure = EXIT_FINISHED, None
    try:
        if MULTIRUN_FLAGS & set(sys.argv):
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


def _prepare_environment() -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
