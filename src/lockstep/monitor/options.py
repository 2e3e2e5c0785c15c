"""What the monitor has to know of how its ranks were started."""

from dataclasses import dataclass, field


@dataclass
class MonitorOptions:
    """Values of JSON: the process that starts the monitor writes them to its stdin.

    is_foreign: another program has started the ranks, so the monitor prints the report, and ends by itself.
    is_printed_by_rank: a rank that was started alone prints the report. agent: torchrun's pid. command: the typed
    words. temporary_folder: what the monitor removes if the launcher is killed. attempt: restarts so far.
    """

    is_foreign: bool = False
    is_printed_by_rank: bool = False
    agent: int | None = None
    command: list[str] = field(default_factory=list)
    temporary_folder: str | None = None
    attempt: int = 0
