"""launch=env: join the ranks that torchrun, srun or mpirun has started; a world of one if none of them has."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.distributed.environment import read_rank_info
from lockstep.errors import ConfigError, RankFailed, StoppedEarly
from lockstep.failures import reporter
from lockstep.failures.record import message_of
from lockstep.launchers.base import Launcher, Worker

CONSEQUENCE_DELAY = 60  # seconds added to the time that torchrun reads, so that it names another rank as the first


class EnvLauncher(Launcher):
    """This process is a rank already, so `launch` just calls the worker."""

    def num_ranks(self) -> tuple[int, int]:
        info = read_rank_info()
        return info.world_size, info.local_world_size

    def launch(self, worker: Worker, *args: Any) -> Any:
        try:
            value = worker(*args)
        except StoppedEarly:
            reporter.ends_well()
            raise
        except BaseException as error:
            reporter.failed(error)
            if isinstance(error, (ConfigError, KeyboardInterrupt)):
                raise
            answer = reporter.wait_for_report()
            if "TORCHELASTIC_ERROR_FILE" in os.environ:  # of the ranks' errors torchrun names the earliest
                delay = 0 if answer is None or answer["is_first"] else CONSEQUENCE_DELAY
                message = f"{type(error).__name__}: {message_of(error)}".partition("\n")[0]
                root_cause = {"message": message, "timestamp": str(int(time.time()) + delay)}
                with suppress(OSError):
                    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(root_cause))
            if answer is None:
                raise
            raise RankFailed("", answer) from error  # the monitor has printed the report
        else:
            reporter.ends_well()
            return value
        finally:
            reporter.disconnect()
