"""launch.recover=live: the launcher replaces a dead rank while the other ranks keep their processes and their state.

The launcher publishes who is which rank in its own store (`lockstep.distributed.generations`), so rank 0 may die, too.
"""

import sys
from typing import Any

from lockstep.distributed.loss_pages import PAGES
from lockstep.distributed.signal_relay import Relay
from lockstep.errors import ConfigError
from lockstep.launchers.base import Worker
from lockstep.launchers.live_process import open_pages, open_store
from lockstep.launchers.live_world import LiveWorld
from lockstep.launchers.supervisor import Supervisor
from lockstep.monitor.start import MonitorLink


def validate_live() -> None:
    """Raise ConfigError where ranks cannot be replaced."""
    from lockstep.distributed.regroup import can_reconfigure

    reasons = {
        "is for Linux": sys.platform != "linux",
        "needs torch 2.14 or later": not can_reconfigure(),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"launch.recover=live {reason}; type launch.recover=restart")


class LiveSupervisor(Supervisor):
    """Ranks of this machine that are replaced when they die. If that cannot help, all are started again, as usual.

    replace_within: see LiveWorld.
    """

    recovers = True

    def __init__(self, name: str, ranks: int, max_restarts: int, replace_within: float) -> None:
        super().__init__("forkserver", ranks, 0, {}, max_restarts, lambda: None)
        self.name, self.replace_within = name, replace_within

    def _attempt(
        self, monitor: MonitorLink, relay: Relay, attempt: int, worker: Worker, args: tuple[Any, ...]
    ) -> tuple[BaseException | None, Any]:
        with open_store(self.name, self.ranks) as (store, env), open_pages(self.ranks) as (pages, path):
            env |= monitor.environment | {"TORCHELASTIC_RESTART_COUNT": str(attempt), PAGES: path}
            job = (env, worker, args)
            world = LiveWorld(self.context, self.ranks, self.replace_within, store, pages, job, relay)
            try:
                for lost in world.supervise():
                    monitor.replaced(lost)
            finally:
                exit_codes = world.end()
            if world.has_finished:
                return None, world.value
            processes = [process.process for process in world.ranks]
            return self._failure(monitor, relay, exit_codes, processes), None
