"""The command line: exit codes, the resolver of the config, `--help`, and the words and the config of a trained run.

No torch here: `--help` imports this.
"""

import gc
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lockstep.compat import register_resolver
from lockstep.config.check import OPTIONS, explain, flatten
from lockstep.config.schema import CONF
from lockstep.distributed.environment import RankInfo, node_rank_info, read_rank_info
from lockstep.distributed.host import ENDS_WITH_PARENT, end_with_parent, remove_temporary_folder
from lockstep.distributed.rendezvous import STORE_TIMEOUT
from lockstep.errors import (
    EXIT_CODES,
    EXIT_FAILED,
    RAISED_BY_ALL,
    ConfigError,
    RankFailed,
    exit_code_of,
    kind_of,
    path_value,
    without_quotes,
)
from lockstep.failures.causes import LOST_RANK
from lockstep.failures.record import is_communication_error
from lockstep.launchers.base import flush_output, print_line

TEXT_FLAGS = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
MULTIRUN_FLAGS = {"--multirun", "-m"}
STARTERS = ("torchrun", "srun", "mpirun")  # programs that live as long as the ranks that they start
RECORD = ".hydra"
# Where and how a run computed, and what it wrote: another command says that itself. The numbers do not depend on it.
NOT_TAKEN = ("resume", "mode", "launch", "logger", "sweep", "hydra", "run_dir", "backend", "strategy", "gradient_sync")
NOT_TAKEN += ("sync_bn", "profiler", "snapshot", "trainer.compile", "trainer.digest", "watch")
VALUES_OF_RUN = ("dataset", "model", "task", "trainer")  # the parts of a config that say what a net computes
INPUTS_OF_NET = ("dataset.mean", "dataset.std", "dataset.class_names")  # of the net's own training, on other data, too


def run(main: Callable[[], Any]) -> NoReturn:
    """Call a hydra.main function and end the process, with one of `lockstep.errors.EXIT_CODES`."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    gc.disable()  # imports and configs create half a million objects that all stay; preflight turns it on
    code: Any = 0
    try:
        with exit_codes():
            code = _run(main)
    except SystemExit as error:  # of argparse, and of the block
        code = error.code
    flush_output()
    remove_temporary_folder()
    # gloo's threads sometimes abort the interpreter while it exits, and torchrun would call a finished run failed.
    os._exit(code if code in EXIT_CODES else 0 if code is None else EXIT_FAILED)


def _run(main: Callable[[], Any]) -> int:
    from lockstep.distributed import signals
    from lockstep.distributed.rendezvous import forget_start

    info = read_rank_info()
    # Started by hand, its parent is a shell, which may end under nohup.
    if info.started_by in STARTERS or os.environ.pop(ENDS_WITH_PARENT, ""):
        end_with_parent()  # imports and the config take seconds, in which it may be killed
    words = [word for word in sys.argv[1:] if not word.startswith(("--local-rank=", "--local_rank="))]
    if {"--help", "-h"} & set(words):
        print(help_text(words) if info.is_rank_zero else "", end="")
        return 0
    register_resolvers()
    for folder in config_dirs(words):
        sys.path.append(str(folder.resolve().parent))  # of the user's own classes, for ranks, too
    sys.argv[1:] = with_overrides_of_run(words)
    if info.world_size > 1:
        signals.listen()  # this rank may have to wait for others before its config is composed
    code = 0
    if MULTIRUN_FLAGS & set(words):
        if info.world_size > 1:
            raise ConfigError(
                f"a sweep inside {info.started_by} would run in every rank; type python src/train.py -m launch=torchrun "
                f"and the same overrides"
            )
        gc.enable()
        from lockstep.sweeps.runner import run_command

        code = run_command(main)
    else:
        main()
    signals.stop_listening()  # the run has finished
    forget_start(info)
    return code


@contextmanager
def exit_codes() -> Iterator[None]:
    """In the block an exception is told and becomes SystemExit with its exit code, which passes Hydra: it would print
    all overrides before another one. In a job of a sweep it stays what it is, for the sweep to tell."""
    try:
        yield
    except Exception as error:
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN and not _is_outermost(error):
            raise
        raise SystemExit(tell(error)) from error
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as stopped:  # StoppedEarly, KeyboardInterrupt
        raise SystemExit(exit_code_of(stopped)) from stopped


def _is_outermost(error: BaseException) -> bool:
    """Whether the block that sees an error is the one of `run`, and not of a job."""
    return any(frame.f_code is _run.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def tell(error: BaseException) -> int:
    """Print an error that ends a command. Returns the exit code."""
    known = as_config_error(error)
    error = known or error
    if known is not None:
        remove_empty_run_folder()
    elif not isinstance(error, RankFailed):
        from lockstep.distributed.host import start_agent_watchdog

        start_agent_watchdog(os.environ)
    if text := _text_of(error):
        print_line(text, sys.stderr)
    return exit_code_of(error)


def as_config_error(error: BaseException) -> ConfigError | None:
    """The ConfigError for an error of the user's input, None for any other."""
    if isinstance(error, ConfigError):
        return error
    sentence = explain(error, sys.argv[1:])
    if sentence is None:
        return None
    found = ConfigError("")
    found.args = (sentence,)  # Hydra's own text below it has several lines
    return found


def _text_of(error: BaseException) -> str:
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


def remove_empty_run_folder() -> None:
    """Hydra makes the run's folder before anything is checked: a refused command leaves none."""
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.RUN:
        folder = Path(HydraConfig.get().runtime.output_dir)
        own = any(word.startswith("hydra.run.dir=") for word in HydraConfig.get().overrides.hydra)
        with suppress(OSError):
            folder.rmdir()
            if not own:  # outputs/<day>
                folder.parent.rmdir()


def register_resolvers() -> None:
    """`${started:format}` in a config is the moment at which the run started, the same on all ranks; `${on_rank_zero:a,b}`
    is a on rank 0 and b on the others."""

    def started(pattern: str, _root_: DictConfig) -> str:
        from lockstep.distributed.rendezvous import run_started_at

        seconds = OmegaConf.select(_root_, "backend.timeout")  # of a config that is not checked yet
        is_number = isinstance(seconds, int | float) and seconds > 0
        timeout = timedelta(seconds=seconds) if is_number else STORE_TIMEOUT
        is_run = not asks_for_text(sys.argv)
        return run_started_at(_composing_rank(_root_), claim=is_run, timeout=timeout).strftime(pattern)

    def on_rank_zero(value: Any, other: Any = None, *, _root_: DictConfig) -> Any:
        return value if _composing_rank(_root_).is_rank_zero else other

    register_resolver("started", started)
    register_resolver("on_rank_zero", on_rank_zero)


def _composing_rank(root: DictConfig) -> RankInfo:
    """This process among those that compose the config of this run: the ranks that another program has started, or with
    launch=spawn on several nodes one process on each."""
    launch: Any = root.get("launch")
    nnodes = launch.get("nnodes") if isinstance(launch, DictConfig) else None
    if isinstance(nnodes, int) and nnodes > 1:
        return node_rank_info(nnodes, launch.node_rank, launch.master_addr, launch.master_port)
    return read_rank_info()


def help_text(words: Sequence[str]) -> str:
    """What --help prints: how to start, the options of each group, and the values of a run with their comments."""
    known = {group: names for group, names in sorted(OPTIONS.items()) if group not in ("hydra", "local")}
    options = "\n".join(f"  {group}: {', '.join(names)}" for group, names in known.items())
    paths = [CONF / "config.yaml"]
    for word in words:
        group, _, option = word.partition("=")
        paths += [CONF / group / f"{option}.yaml"] * (option in known.get(group, ()))
    values = "\n\n".join(f"conf/{path.relative_to(CONF)}\n\n{path.read_text().rstrip()}" for path in paths)
    values = re.sub(r"\ndefaults:.*?\n\n", "\n", values, count=1, flags=re.DOTALL)
    values = re.sub(r"\n\nhydra:.*?(?=\n\n|$)", "", values, count=1, flags=re.DOTALL)
    start = (CONF / "help.txt").read_text()
    return f"{start}\nChoose one option of a group (group=option):\n\n{options}\n\nSet any value (trainer.epochs=10):\n\n{values}\n"


# ---- The words and the config of a trained run


def with_overrides_of_run(words: list[str]) -> list[str]:
    """The words with the overrides of the run that `resume` names before them, where the mode uses a trained run.

    Its log goes to a folder of the mode inside the run folder, so that no new run folder is made; that of mode=check to
    one that is removed. Raises ConfigError for a folder without a record.
    """
    mode, resume = chosen("mode", words) or "train", chosen("resume", words)
    if mode in ("train", "find_lr") or asks_for_text(words):
        return words
    if MULTIRUN_FLAGS & set(words):
        raise ConfigError(f"mode={mode} is no training, and a sweep trains; type the command without -m, run by run")
    if mode == "check":
        from multiprocessing.util import get_temp_dir

        return [*words, f"hydra.run.dir={path_value(Path(get_temp_dir(), mode))}"]
    if resume in (None, "null"):
        return words
    folder = run_folder(without_quotes(str(resume)))
    typed = [word for word in words if not word.startswith("-")]
    recorded = [str(word) for word in _read(folder / RECORD / "overrides.yaml")]
    kept = [word for word in recorded if not _sets(word, NOT_TAKEN) and not _is_replaced(_key(word), typed)]
    where = (
        [] if any(_key(word) == "hydra.run.dir" for word in typed) else [f"hydra.run.dir={path_value(folder / mode)}"]
    )
    return [*where, *kept, *words]


def with_values_of_run(cfg: DictConfig) -> DictConfig:
    """`cfg` with the values of the run that a mode uses, but for what is typed: a YAML file may say another one today."""
    mode, resume = HydraConfig.get().runtime.choices.get("mode"), cfg.get("resume")
    if mode in ("train", "find_lr", "check") or resume is None:
        return cfg
    folder = run_folder(str(resume))
    recorded = _read(folder / RECORD / "overrides.yaml")
    typed = [word for word in HydraConfig.get().overrides.task if word not in recorded]
    classes = {_key(word).removesuffix("._target_") for word in typed if _key(word).endswith("._target_")}
    config = _read(folder / RECORD / "config.yaml")
    for key, value in flatten({name: config.get(name) or {} for name in VALUES_OF_RUN}).items():
        stays = key in INPUTS_OF_NET and key not in map(_key, typed)
        replaced = _is_replaced(key, typed) or any(key.startswith(f"{name}.") for name in classes)
        if not _sets(key, NOT_TAKEN) and (stays or not replaced):
            OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    if config.get("parameters"):
        cfg.parameters.init, cfg.parameters.new_layers = None, []  # the weights of the run are in its snapshots
    return cfg


def run_folder(resume: str) -> Path:
    """The run folder of `resume`: a run folder, its snapshots/, or a file in one of them. Raises ConfigError."""
    path = Path(resume).expanduser()
    for folder in (path, path.parent, path.parent.parent):
        if (folder / RECORD / "overrides.yaml").is_file():
            return folder
    what = "is in no run folder" if path.exists() else "does not exist"
    raise ConfigError(f"resume={resume} {what}; type resume=<a run folder, with {RECORD}/ inside, or a snapshot in it>")


def chosen(key: str, words: Sequence[str]) -> str | None:
    """What is typed for `mode` or `resume`, or else said by the typed preset, or by conf/local: found without composing,
    since Hydra refuses a key of the run's own data set before `main` sees it."""
    typed = {_key(word): word.partition("=")[2] for word in words if not word.startswith("-") and "=" in word}
    if key in typed:
        return typed[key]
    for name in [f"experiment/{typed.get('experiment')}", "local/default"]:
        for folder in (*config_dirs(words), CONF):
            path = folder / f"{name}.yaml"
            found = _read(path) if path.is_file() else {}
            said = [item for item in found.get("defaults", []) if isinstance(item, dict)]
            options = {
                str(one).removeprefix("override ").lstrip("/"): option for item in said for one, option in item.items()
            }
            if found.get(key, options.get(key)) is not None and isinstance(found.get(key, options.get(key)), str):
                return str(found.get(key, options.get(key)))
    return None


def config_dirs(words: Sequence[str]) -> list[Path]:
    """The folders of configs that are typed."""
    pairs = zip(words, [*words[1:], ""], strict=True)
    typed = [
        word.partition("=")[2] or after for word, after in pairs if word.partition("=")[0] in ("--config-dir", "-cd")
    ]
    searched = [word.partition("=")[2].strip("[]'\"") for word in words if word.startswith("hydra.searchpath=")]
    return [
        Path(name.strip(" '\"").removeprefix("file://")) for name in [*typed, *",".join(searched).split(",")] if name
    ]


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} cannot be read ({' '.join(str(error).split())}); type the name of another one"
        ) from None


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~").partition("@")[0]


def _sets(word: str, names: Sequence[str]) -> bool:
    """Whether `word` sets one of `names`, or what is below it."""
    return any(_key(word) == name or _key(word).startswith((f"{name}.", f"{name}/")) for name in names)


def _is_replaced(key: str, typed: Sequence[str]) -> bool:
    """Whether what is typed stands for `key`: the same one, what is above it, or another option of its group."""
    return any(key == _key(word) or key.startswith(f"{_key(word)}.") for word in typed)


def asks_for_text(words: Sequence[str]) -> bool:
    """Whether the command only prints something, such as --help."""
    return any(word.partition("=")[0] in TEXT_FLAGS for word in words)
