"""launch=torchrun: ranks on this machine, and restarts as torchrun makes them, from inside this process.

This does not use torch's elastic agent, which `torchrun src/train.py` starts. That agent listens on all interfaces,
unpickles what it finds in its store, waits 30 s for a rank that does not end, and may name the wrong rank.
"""

from typing import Any

from lockstep.distributed.environment import RankInfo, node_rank_info
from lockstep.distributed.rendezvous import close_store, hold_port, shared_store
from lockstep.errors import ConfigError
from lockstep.launchers.base import Launcher, Worker, refuse_nesting
from lockstep.launchers.processes import preload, resolve_nproc, start_method_here, validate_start_method
from lockstep.launchers.supervisor import Supervisor, rank_environment


class TorchrunLauncher(Launcher):
    """nproc_per_node: ranks, or auto, gpu or cpu. max_restarts: how often ranks that fail are restarted together."""

    starts_processes = True

    def __init__(self, start_method: str, nproc_per_node: int | str, max_restarts: int) -> None:
        self.start_method, self.nproc_per_node, self.max_restarts = start_method, nproc_per_node, max_restarts

    def prepare(self, rank_imports: str) -> None:
        self.start_method = start_method_here(self.start_method, self.max_restarts > 0, rank_imports)
        preload(self.start_method, rank_imports)

    def validate(self) -> None:
        validate_start_method(self.start_method)
        resolve_nproc(self.nproc_per_node)
        refuse_nesting("torchrun")
        if self.start_method == "fork" and self.max_restarts:
            raise ConfigError(
                "launch.start_method=fork cannot restart ranks: after the first start this process has threads; "
                "type launch.start_method=forkserver"
            )

    def num_ranks(self) -> tuple[int, int]:
        ranks = resolve_nproc(self.nproc_per_node)
        return ranks, ranks

    def launch(self, worker: Worker, *args: Any) -> Any:
        ranks = resolve_nproc(self.nproc_per_node)
        node: RankInfo = hold_port(node_rank_info(1, 0, "127.0.0.1", 0))
        env = rank_environment(node, ranks, ranks, "torchrun")
        supervisor = Supervisor(self.start_method, ranks, 0, env, self.max_restarts, lambda: shared_store(node))
        try:
            return supervisor.run(worker, *args)
        finally:
            close_store(node)
