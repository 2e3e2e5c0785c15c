"""launch=torchrun: torch's elastic agent in this process, and the ranks of this machine under it."""

import uuid
from typing import Any

from lockstep.errors import StoppedEarly
from lockstep.launchers.base import Launcher, Worker, refuse_nesting
from lockstep.launchers.processes import preload, rank_failure, resolve_nproc, run_rank, validate_start_method


class TorchrunLauncher(Launcher):
    """nproc_per_node: ranks, or auto, gpu or cpu. max_restarts: how often ranks that fail are restarted together."""

    starts_processes = True

    def __init__(self, start_method: str, nproc_per_node: int | str, max_restarts: int) -> None:
        self.start_method, self.nproc_per_node, self.max_restarts = start_method, nproc_per_node, max_restarts

    def prepare(self) -> None:
        preload(self.start_method)

    def validate(self) -> None:
        validate_start_method(self.start_method)
        resolve_nproc(self.nproc_per_node)
        refuse_nesting("torchrun")

    def num_ranks(self) -> tuple[int, int]:
        ranks = resolve_nproc(self.nproc_per_node)
        return ranks, ranks

    def launch(self, worker: Worker, *args: Any) -> Any:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=resolve_nproc(self.nproc_per_node),
            max_restarts=self.max_restarts,
            monitor_interval=0.1,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            start_method=self.start_method,
            local_addr="127.0.0.1",
            signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        )
        try:
            return elastic_launch(config, run_rank)(worker, *args)[0]
        except SignalException as received:
            raise StoppedEarly(f"asked to stop ({received.sigval.name})") from None
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            message = failure.message if isinstance(failure.message, str) else failure.message.get("message", "")
            raise rank_failure(rank, failure.exitcode, message) from None
