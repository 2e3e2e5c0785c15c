"""Where Hydra works otherwise here: a quick --help, also on Python 3.14, and no line of its own before an error."""

import argparse
import sys
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus


def copy_config_store_once() -> None:
    """Hydra's --help copies its store of configs a hundred times, which takes 0.3 s. It changes none of the copies."""

    def keep(store: ConfigStore, memo: dict[int, Any]) -> ConfigStore:
        return store

    setattr(ConfigStore, "__deepcopy__", keep)  # noqa: B010  (mypy refuses the assignment)


def accept_lazy_help() -> None:
    """hydra-core 1.3 gives argparse a help text that is an object, not a string. Python 3.14 refuses it."""
    if sys.version_info < (3, 14):
        return
    add_argument = argparse.ArgumentParser.add_argument

    def add_argument_with_text(parser: argparse.ArgumentParser, *words: str, **options: Any) -> argparse.Action:
        if "help" in options and not isinstance(options["help"], str):
            options["help"] = argparse.SUPPRESS
        return add_argument(parser, *words, **options)

    setattr(argparse.ArgumentParser, "add_argument", add_argument_with_text)  # noqa: B010  (mypy refuses the assignment)


def leave_errors_to_us() -> None:
    """Hydra writes all overrides before the error of a job. Ours says what to type, and is the only line."""

    def value_or_error(job: JobReturn) -> Any:
        if job.status == JobStatus.COMPLETED:
            return job._return_value
        raise job._return_value

    setattr(JobReturn, "return_value", JobReturn.return_value.getter(value_or_error))  # type: ignore[attr-defined] # noqa: B010
