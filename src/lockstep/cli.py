"""The command line: exit codes, `--help`, a resolver, and the words and the config of a trained run. No torch here."""

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lockstep import errors
from lockstep.compat import register_resolver, remove_temporary_folder
from lockstep.config.check import OPTIONS, explain, flatten, key_of, raised_by
from lockstep.config.record import RECORD, sets, typed_overrides
from lockstep.config.schema import CONF, NO_NUMBER, SHARED_BY
from lockstep.distributed import environment, host, signals
from lockstep.distributed.rendezvous import STORE_TIMEOUT, run_started_at
from lockstep.distributed.run_folder import folder_of_run, unwritable
from lockstep.launchers.base import flush_output

LONG_FLAGS = {"-cd": "--config-dir", "-cn": "--config-name", "-cp": "--config-path", "-p": "--package", "-c": "--cfg"}
TEXT_FLAGS = {"--help", "-h", "--hydra-help", "--version", "--cfg", "--info", "-i", "--shell-completion", "-sc"}
MULTIRUN_FLAGS = {"--multirun", "-m"}
OWN_CONFIG = (None, "train", "find_lr", "check")  # the modes whose config is that of the command alone
NOT_TAKEN = tuple({*NO_NUMBER, *SHARED_BY, "trainer.compile"} - {"data_dir"})  # of a run that a mode uses
VALUES_OF_RUN = ("dataset", "loader", "model", "task", "trainer")  # the parts of a config that say what a net computes


def run(main: Callable[[], Any]) -> NoReturn:
    """Call a hydra.main function and end the process, with one of `lockstep.errors.EXIT_CODES`."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    gc.disable()  # imports and configs create half a million objects that all stay; preflight turns it on
    code = errors.EXIT_FINISHED
    words = words_of(word for word in sys.argv[1:] if not word.startswith(("--local-rank=", "--local_rank=")))
    try:
        with exit_codes():
            info = environment.read_rank_info()
            if info.world_size > 1:
                environment.export_rank_info(info)
            # Programs that live as long as their ranks; a shell may end under nohup.
            if info.started_by in ("torchrun", "srun", "mpirun") or os.environ.pop(host.ENDS_WITH_PARENT, ""):
                host.end_with_parent()  # imports and the config take seconds, in which it may be killed
            if {"--help", "-h"} & {*words} and info.rank == 0:
                groups = [f"  {group}: {', '.join(names)}" for group, names in sorted(OPTIONS.items()) if names]
                options = "\n".join(groups)
                said, values = ((CONF / name).read_text() for name in ("help.txt", "config.yaml"))
                print(f"{said}\nOptions (group=option):\n\n{options}\n\nValues (key=value):\n\n{values}", end="")
            elif info.rank == 0 or not asks_for_text(words):
                register_resolvers()
                # argparse takes no flag between two overrides.
                sys.argv[1:] = sorted(with_overrides_of_run(words), key=lambda word: not word.startswith("-"))
                if info.world_size > 1:
                    signals.listen()  # this rank may have to wait for others before its config is composed
                    if MULTIRUN_FLAGS & {*words} and not asks_for_text(words):
                        what = f"a sweep starts the ranks of each job itself; leave {info.started_by} out"
                        raise errors.ConfigError(f"{what}, and type launch=torchrun")
                main()
                signals.stop_listening()  # the run has finished
    except SystemExit as error:  # of argparse, and of the block
        code = error.code or 0  # type: ignore[assignment]
    flush_output()
    remove_temporary_folder()
    # gloo's threads sometimes abort the interpreter while it exits, and torchrun would call a finished run failed.
    os._exit(code if code in errors.EXIT_CODES else errors.EXIT_FAILED)


@contextmanager
def exit_codes() -> Iterator[None]:
    """In the block an error is told and becomes SystemExit with its exit code, which Hydra lets pass as it is."""
    try:
        yield
    except (errors.StoppedEarly, KeyboardInterrupt) as stopped:  # which somebody has told
        raise SystemExit(errors.exit_code_of(stopped)) from stopped
    except Exception as error:
        shown = as_config_error(error) or error
        if isinstance(shown, errors.ConfigError):
            with suppress(Exception):  # it is not empty, or there is none
                folder = Path(HydraConfig.get().runtime.output_dir)  # which Hydra makes before anything is checked
                folder.rmdir()
                if not any(word.startswith("hydra.run.dir=") for word in HydraConfig.get().overrides.hydra):
                    folder.parent.rmdir()  # outputs/<day>
            if os.environ.get("LOCAL_RANK", "0") != "0":
                time.sleep(1)  # rank 0 of this machine usually prints the same, and the launcher ends this rank
        text = f"lockstep: {shown}"
        if isinstance(shown, errors.RankFailed):
            text = str(shown)  # a report; empty if another rank prints it
        elif errors.kind_of(shown) not in errors.RAISED_BY_ALL:
            text = "".join(traceback.format_exception(shown)).rstrip("\n")
        if text:
            errors.print_line(text, sys.stderr)
        raise SystemExit(errors.exit_code_of(shown)) from error


def as_config_error(error: BaseException, words: Sequence[str] | None = None) -> errors.ConfigError | None:
    """The ConfigError for an error of the user's input, None for any other. words: of another command than this one."""
    if isinstance(error, errors.ConfigError):
        return error
    if isinstance(error, OSError) and error.filename and raised_by(error) == "hydra":  # which makes the run folder
        return errors.ConfigError(unwritable(error.filename, error))
    sentence = explain(error, sys.argv[1:] if words is None else words)
    return None if sentence is None else errors.ConfigError(sentence)


def register_resolvers() -> None:
    """`${started:format}` in a config is the moment at which the run started, the same on all ranks; %f is in ms."""

    def started(pattern: str, _root_: DictConfig) -> str:
        launch, seconds = _root_.get("launch"), OmegaConf.select(_root_, "backend.timeout")  # they are not checked yet
        if isinstance(launch, DictConfig) and isinstance(nnodes := launch.get("nnodes"), int) and nnodes > 1:
            info = environment.node_rank_info(nnodes, launch.node_rank, launch.master_addr, launch.master_port)
        else:
            info = environment.read_rank_info()
        timeout = timedelta(seconds=seconds) if isinstance(seconds, int | float) and seconds > 0 else STORE_TIMEOUT
        moment = run_started_at(info, not asks_for_text(sys.argv), timeout)
        return moment.strftime(pattern.replace("%f", f"{moment.microsecond // 1000:03}"))

    register_resolver("started", started)


def words_of(typed: Iterable[str]) -> list[str]:
    """The words of a command with each flag and its value in one: -cd a is --config-dir=a. The parents of such folders
    go on the path: classes of the user's are there."""
    words = list[str]()
    for word in typed:
        flag, equals, value = word.partition("=")
        if words and words[-1] in LONG_FLAGS.values():
            words[-1] += f"={word}"
        else:
            words.append(f"{LONG_FLAGS.get(flag, flag)}{equals}{value}")
    parents = [str(folder.resolve().parent) for folder in config_dirs(words)]
    sys.path += [parent for parent in parents if parent not in sys.path]
    return words


def asks_for_text(words: Sequence[str]) -> bool:
    """Whether the command only prints something, such as --help."""
    return any(word.partition("=")[0] in TEXT_FLAGS for word in words)


def config_dirs(words: Sequence[str]) -> list[Path]:
    return [Path(word.partition("=")[2]) for word in words if word.startswith("--config-dir=")]


# ---- The words and the config of a trained run. words: as `words_of` gives them.


def with_overrides_of_run(words: list[str]) -> list[str]:
    """The words with the overrides of the run that `resume` names before them, where the mode uses a trained run. Its
    log goes to a folder inside the run folder; that of mode=check to one that is removed. Raises ConfigError."""
    mode, resume = chosen("mode", words), chosen("resume", words)
    if asks_for_text(words) or MULTIRUN_FLAGS & {*words}:
        return words
    if mode == "check":
        from multiprocessing.util import get_temp_dir

        return [*words, f"hydra.run.dir={errors.path_value(Path(get_temp_dir(), mode))}"]
    if mode in OWN_CONFIG or resume is None:
        return words
    folder = folder_of_run(resume)
    recorded = [str(word) for word in read_yaml(folder / RECORD / "overrides.yaml")]
    kept = [word for word in recorded if not sets(word, (*NOT_TAKEN, *map(key_of, words)))]
    if not any(word.startswith("hydra.run.dir=") for word in words):
        kept.append(f"hydra.run.dir={errors.path_value(folder / str(mode))}")
    return [*kept, *words]


def with_values_of_run(cfg: DictConfig) -> DictConfig:
    """`cfg` with the values of the run that a mode uses, but for what is typed: a YAML file may say another today."""
    if HydraConfig.get().runtime.choices.get("mode") in OWN_CONFIG or cfg.get("resume") is None:
        return cfg
    from lockstep.runs.record import read_run

    record = folder_of_run(str(cfg.resume)) / RECORD
    config, recorded = read_yaml(record / "config.yaml"), read_yaml(record / "overrides.yaml")
    typed = [key_of(word) for word in typed_overrides(HydraConfig.get()) if word not in recorded]
    typed += [key.removesuffix("._target_") for key in typed]  # the arguments of a typed class are its own
    for key, value in flatten({name: config.get(name) or {} for name in VALUES_OF_RUN}).items():
        stays = key in ("dataset.mean", "dataset.std") and key not in typed  # of the net's training, on other data, too
        if not sets(key, NOT_TAKEN) and (stays or not sets(key, typed)):
            OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    if cfg.dataset.get("classes", 0) is None:  # images without labels do not tell
        with suppress(errors.ConfigError):
            cfg.dataset.classes = read_run(record.parent)["config"].get("dataset.classes")
    cfg.parameters.init, cfg.parameters.new_layers = None, []  # the weights of the run are in its snapshots
    return cfg


def chosen(key: str, words: Sequence[str]) -> str | None:
    """What is typed for `mode` or `resume`, or else said by the typed preset, or by conf/local. Nothing is composed:
    without the words of the run Hydra would refuse a key of the run's own data set."""
    typed = {key_of(word): word for word in words if "=" in word}
    if key in typed:
        value = OverridesParser.create().parse_override(typed[key]).value()
        return None if value is None else str(value)
    names = [f"experiment/{typed.get('experiment', '').partition('=')[2]}", "local/default"]
    paths = [folder / f"{name}.yaml" for name in names for folder in (*config_dirs(words), CONF)]
    for found in [read_yaml(path) for path in paths if path.is_file()]:
        options = [item for item in found.get("defaults", []) if isinstance(item, dict)]
        said = {str(group).split("/")[-1]: option for item in options for group, option in item.items()} | found
        if isinstance(said.get(key), str):
            return str(said[key])
    return None


def read_yaml(path: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(path))
