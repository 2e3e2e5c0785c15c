"""launch=env: join the ranks that torchrun, srun or mpirun has started; a world of one if none of them has."""

from typing import Any

from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.host import end_with_parent
from lockstep.launchers.base import Launcher, Worker


class EnvLauncher(Launcher):
    """This process is a rank already, so `launch` just calls the worker."""

    def validate(self) -> None:
        read_rank_info()

    def num_ranks(self) -> tuple[int, int]:
        info = read_rank_info()
        return info.world_size, info.local_world_size

    def launch(self, worker: Worker, *args: Any) -> Any:
        if read_rank_info().started_by != "python":
            end_with_parent()
        return worker(*args)
