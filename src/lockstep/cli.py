"""The command line: resolvers of the config, errors as sentences, exit codes. No torch: `--help` imports this."""

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.cli_arguments import asks_for_text, prepare_arguments, refuse_sampling_sweep
from lockstep.cli_errors import as_config_error, find_cause, missing_value
from lockstep.config.schema import register_schema
from lockstep.distributed.environment import RankInfo, node_rank_info, read_rank_info
from lockstep.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, StoppedEarly, TrainingDiverged

EXIT_INTERRUPTED = 130  # 128 + SIGINT
MEANINGS = {  # words in gloo's errors, and what they mean
    "Timed out waiting": "a rank did not answer within backend.timeout: it hangs, or the network to it is down. "
    "The files in logs/ show what each rank did last",
    "by peer": "another rank ended before this one. Its error is the cause; it is shown here or stands in logs/",
}


def register_resolvers() -> None:
    """Register the schema, `${started:format}` and `${on_rank_zero:value,other}`. Must run before a config is composed.

    `started` is the moment at which the run started, the same on all ranks. `on_rank_zero` is `value` on rank 0 and
    `other` on the other ranks.
    """
    register_schema()

    def started(pattern: str, _root_: DictConfig) -> str:
        from lockstep.distributed.store import run_started_at

        return run_started_at(_composing_rank(_root_)).strftime(pattern)

    def on_rank_zero(value: Any, other: Any = None, *, _root_: DictConfig) -> Any:
        return value if _composing_rank(_root_).is_rank_zero else other

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


def resolve(cfg: DictConfig) -> DictConfig:
    """cfg with every interpolation resolved, for processes without Hydra. Raises ConfigError for a missing value."""
    try:
        container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        if find_cause(error) is not None:
            raise
        raise missing_value(error) from None
    resolved = OmegaConf.create(container)
    assert isinstance(resolved, DictConfig)
    return resolved


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
    # Imports and configs create half a million objects that all stay. Searching them for garbage takes 0.2 s.
    gc.disable()
    _accept_lazy_help()
    _prepare_environment()
    try:
        code = _run(main)
    except SystemExit as error:
        code = _exit_code(error)
    except StoppedEarly:
        code = EXIT_RESUMABLE
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Exception as error:
        is_closed_pipe = isinstance(error, BrokenPipeError) and asks_for_text(sys.argv)  # `--help | head`
        code = EXIT_FINISHED if is_closed_pipe else _report(error)
    _flush()
    # gloo's threads sometimes abort the interpreter while it exits, and torchrun would call a finished run failed.
    os._exit(code)


def _exit_code(error: SystemExit) -> int:
    if isinstance(error.code, str):
        print(error.code, file=sys.stderr)
        return EXIT_FAILED
    return error.code or EXIT_FINISHED


def _run(main: Callable[[], Any]) -> int:
    from lockstep.distributed import signals
    from lockstep.distributed.store import forget_start

    sys.argv = prepare_arguments(sys.argv)
    info = read_rank_info()
    register_resolvers()
    if asks_for_text(sys.argv):
        if not info.is_rank_zero:
            return EXIT_FINISHED
        _copy_config_store_once()
    if info.started_by == "srun":
        signals.listen()  # Slurm can preempt a job while its ranks still import torch. The job must not fail then.
    sys.argv = refuse_sampling_sweep(sys.argv, info)
    main()
    forget_start(info)
    return EXIT_FINISHED


def _copy_config_store_once() -> None:
    """Hydra's --help copies its store of configs a hundred times, which takes 0.3 s. It changes none of the copies."""

    def keep(store: ConfigStore, memo: dict[int, Any]) -> ConfigStore:
        return store

    setattr(ConfigStore, "__deepcopy__", keep)  # noqa: B010  (mypy refuses the assignment)


def _accept_lazy_help() -> None:
    """hydra-core 1.3 gives argparse a help text that is an object, not a string. Python 3.14 refuses it."""
    if sys.version_info < (3, 14):
        return
    add_argument = argparse.ArgumentParser.add_argument

    def add_argument_with_text(parser: argparse.ArgumentParser, *words: str, **options: Any) -> argparse.Action:
        if "help" in options and not isinstance(options["help"], str):
            options["help"] = argparse.SUPPRESS
        return add_argument(parser, *words, **options)

    setattr(argparse.ArgumentParser, "add_argument", add_argument_with_text)  # noqa: B010  (mypy refuses the assignment)


def _prepare_environment() -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    # A job that submitit starts on another machine begins in submitit's script and imports this package from there.
    source = str(Path(__file__).parents[1])
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if source not in folders:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, *folders]))


def _report(error: Exception) -> int:
    """Print the error, as a sentence if the user's input caused it. Returns the exit code."""
    sentence = as_config_error(error, sys.argv[1:])
    if sentence is not None:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # Rank 0 of this machine usually prints the same sentence, and the launcher then ends this rank.
            time.sleep(1)
        print(f"lockstep: {sentence}", file=sys.stderr)
        return EXIT_CONFIG
    _tell_torchrun(error)
    if isinstance(error, TrainingDiverged):
        print(f"lockstep: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
        for words, meaning in MEANINGS.items():
            if words in str(error):
                print(f"lockstep: {meaning}", file=sys.stderr)
    from lockstep.distributed.agent_watchdog import start_agent_watchdog

    start_agent_watchdog(os.environ)
    return EXIT_FAILED


def _tell_torchrun(error: Exception) -> None:
    """Write the exception to the file in which torchrun looks for the root cause."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # closed, as by `| head`: a finished run has still finished
            stream.flush()
