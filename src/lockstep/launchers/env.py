"""launch=env: join the ranks that torchrun, srun or mpirun has started; a world of one if none of them has."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.distributed import signals
from lockstep.distributed.environment import read_rank_info
from lockstep.errors import ConfigError, RankFailed
from lockstep.failures.record import heartbeat
from lockstep.failures.report import leave, screen, tell, typed_command
from lockstep.launchers.base import Launcher, Worker

ECHO_DELAY = 60  # seconds added to the time that torchrun reads, so that it names another rank as the first


class EnvLauncher(Launcher):
    """This process is a rank already, so `launch` just calls the worker."""

    def num_ranks(self) -> tuple[int, int]:
        info = read_rank_info()
        return info.world_size, info.local_world_size

    def launch(self, worker: Worker, *args: Any) -> Any:
        info = read_rank_info()
        heartbeat.begin(info.rank, info.world_size)
        try:
            return worker(*args)
        except (Exception, KeyboardInterrupt) as error:
            heartbeat.fails(error)
            # A sentence needs no report; a rank that has not met the others is the only one to know.
            if isinstance(error, ConfigError | KeyboardInterrupt) or heartbeat.record["run_dir"] is None:
                raise
            found, prints = tell(heartbeat.folder, typed_command(info.started_by), heartbeat.record)
            report = found or {}
            _tell_torchrun(report, info.rank)
            raise RankFailed(screen(report) if prints else "", report) from error
        finally:
            signals.each_second(None)
            heartbeat.enter("end")
            folder = heartbeat.folder
            heartbeat.begin()
            leave(folder)


def _tell_torchrun(report: dict[str, Any], rank: int) -> None:
    """Of the ranks' errors torchrun names the earliest, by whole seconds."""
    delay = 0 if report["first"]["rank"] == rank else ECHO_DELAY
    message = screen(report).partition("\n")[0].removeprefix("lockstep: ")
    with suppress(OSError, KeyError):
        file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        file.write_text(json.dumps({"message": message, "timestamp": str(int(time.time()) + delay)}))
