"""A launcher: launch._target_=my_launcher.PoolLauncher +launch.ranks=2"""

import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from lockstep.launchers.base import Launcher, Worker, refuse_nesting


class PoolLauncher(Launcher):
    """Ranks are the processes of a pool on this machine."""

    start_method = "spawn"
    starts_processes = True

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def validate(self) -> None:
        refuse_nesting()

    def num_ranks(self) -> tuple[int, int]:
        return self.ranks, self.ranks

    def launch(self, worker: Worker, *args: Any) -> Any:
        context = multiprocessing.get_context(self.start_method)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]  # free now; another program may take it before rank 0 listens
        with ProcessPoolExecutor(self.ranks, context) as pool:
            running = [pool.submit(run_rank, rank, self.ranks, port, worker, *args) for rank in range(self.ranks)]
            for finished in as_completed(running):
                finished.result()  # raises what the first failed rank raised
            return running[0].result()


def run_rank(rank: int, size: int, port: int, worker: Worker, *args: Any) -> Any:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    return worker(*args)
