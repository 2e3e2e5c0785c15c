"""Checks at the start that all ranks have the same config, code and data."""

import hashlib
import json
import secrets
from typing import Any

from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.source_code import module_hashes


def require_same_config(world: World, flat: dict[str, Any], shown: dict[str, Any], hint: str) -> None:
    """Raise ConfigError, on all ranks, if they hold different `flat` configs {key: plain value}. A collective.

    shown: `flat` as a message may show it, without values that are secret. hint: what to type instead.
    """
    salt = world.broadcast_json(secrets.token_hex())  # without it a short secret could be guessed from its digest
    if len(set(world.all_gather_json(_digest(salt, flat)))) == 1:
        return
    configs = world.all_gather_json({key: [shown[key], _digest(salt, value)] for key, value in flat.items()})
    first, missing = configs[0], ["missing", ""]
    for rank, config in enumerate(configs):
        for key in sorted({*first, *config}):
            (on_zero, digest), (here, other) = first.get(key, missing), config.get(key, missing)
            if digest != other:
                raise ConfigError(
                    f"{key} differs between ranks: {on_zero!r} on rank 0 and {here!r} on rank {rank}; {hint}"
                )


def _digest(salt: str, value: Any) -> str:
    return hashlib.sha256(f"{salt} {json.dumps(value)}".encode()).hexdigest()[:16]


def require_same_code(world: World) -> None:
    """Raise ConfigError, on all ranks, if a loaded module of this project or of the user's differs between ranks.

    Modules that only some ranks have loaded are not compared: rank 0 alone has loggers. A collective.
    """
    loaded = world.all_gather_json(module_hashes())
    for rank, modules in enumerate(loaded):
        other = sorted(name for name in modules.keys() & loaded[0].keys() if modules[name] != loaded[0][name])
        if other:
            more = f" and {len(other) - 1} more" if len(other) > 1 else ""
            raise ConfigError(
                f"rank {rank} has other code than rank 0: the file of {other[0]}{more} differs; "
                f"copy the same code to every machine and type the command again"
            )


class OtherData(ConfigError):
    """A data set is not alike on all ranks. name: "training data" or "test data"."""

    def __init__(self, sentence: str, name: str) -> None:
        super().__init__(sentence)
        self.name = name


def require_same_data(world: World, name: str, length: int, fingerprint: str) -> None:
    """Raise OtherData, on all ranks, if a data set differs between ranks. A collective.

    name: "training data" or "test data". fingerprint: see `lockstep.snapshots.data_fingerprint`.
    """
    everyone = world.all_gather_json((length, fingerprint))
    first_length, first_fingerprint = everyone[0]
    for rank, (other_length, other_fingerprint) in enumerate(everyone):
        if other_length != first_length:
            what = f"the {name} has {other_length} samples on rank {rank} and {first_length} on rank 0"
        elif other_fingerprint != first_fingerprint:
            what = f"the {name} of rank {rank} is not that of rank 0: as many samples, but other ones"
        else:
            continue
        raise OtherData(f"{what}; copy the same data to every machine and type the command again", name)
