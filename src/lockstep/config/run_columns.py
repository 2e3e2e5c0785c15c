"""The keys and values by which runs are compared, such as the columns of TensorBoard's HParams table."""

from collections.abc import Mapping
from typing import Any

from lockstep.config.fields import show

# Where a run is, and how it was started: not what it computes.
LEFT_OUT = {"run_dir", "data_dir", "resume", "local", "mode", "trainer.pause_after"}
LEFT_OUT_BELOW = ("launch", "logger", "mode.", "backend.", "sweep.")
LEFT_OUT_NAMES = ("._target_", "._partial_", "sync_bn.mode")  # the option's name says it

Column = bool | int | float | str


def run_columns(flat: Mapping[str, Any], options: Mapping[str, str | None], world_size: int) -> dict[str, Column]:
    """{key: value} of a run: the options of the config groups, such as model, all keys, and the number of ranks.

    flat: the config by full keys. options: {config group: option}. Numbers stay numbers; lists become text. A key that
    is null is left out: TensorBoard would show all its values as text.
    """
    columns = {group: option for group, option in options.items() if "/" not in group} | dict(flat)
    columns["world_size"] = world_size
    return {
        key: value if isinstance(value, bool | int | float | str) else show(value)
        for key, value in columns.items()
        if value is not None
        and key not in LEFT_OUT
        and not key.startswith(LEFT_OUT_BELOW)
        and not key.endswith(LEFT_OUT_NAMES)
    }
