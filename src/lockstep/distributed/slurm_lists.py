"""How Slurm writes lists of hosts, and of how many tasks each of them has. No torch here."""

import re

from lockstep.errors import ConfigError


def first_host(nodelist: str) -> str:
    """The first name in a list: "gpu[07-09,12],cpu1" -> "gpu07", "rack[0-1]b[3,5]-ib" -> "rack0b3-ib".

    An empty list is this machine.
    """
    first = re.match(r"([^,\[]|\[[^\]]*\])*", nodelist)  # up to a comma that is not in brackets
    name = first[0] if first else ""
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", name) or "127.0.0.1"


def tasks_per_node(counts: str) -> list[int]:
    """The tasks of each host: "2(x2),1" -> [2, 2, 1]. Raises ConfigError."""
    tasks: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE={counts} in the environment is not a list such as 2(x2),1; "
                f"type `unset SLURM_STEP_TASKS_PER_NODE`, or start with srun"
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
