"""The keys and values by which runs are compared, such as the columns of TensorBoard's HParams table."""

from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

from lockstep.config.fields import show

# Where a run is, and how it was started: not what it computes.
LEFT_OUT = {"run_dir", "data_dir", "resume", "local"}
LEFT_OUT_BELOW = ("launch", "logger")
LEFT_OUT_NAMES = ("._target_", "._partial_", "backend.name", "sync_bn.mode")  # the option's name says it

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's takes a tenth of the time

Column = bool | int | float | str


def run_columns(flat: Mapping[str, Any], hydra_yaml: str, world_size: int) -> dict[str, Column]:
    """{key: value} of a run: the options of the config groups, such as model, all keys, and the number of ranks.

    flat: the config by full keys. hydra_yaml: Hydra's part of the run's record, empty if there is none. Numbers stay
    numbers; lists become text. A key that is null is left out: TensorBoard would show all its values as text.
    """
    recorded = yaml.load(hydra_yaml, LOADER) if hydra_yaml else {}
    choices = recorded.get("hydra", {}).get("runtime", {}).get("choices", {})
    columns = {group: option for group, option in choices.items() if "/" not in group} | dict(flat)
    columns["world_size"] = world_size
    return {
        key: value if isinstance(value, bool | int | float | str) else show(value)
        for key, value in columns.items()
        if value is not None
        and key not in LEFT_OUT
        and not key.startswith(LEFT_OUT_BELOW)
        and not key.endswith(LEFT_OUT_NAMES)
    }
