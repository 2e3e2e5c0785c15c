"""Starters: each ends in work(cfg) running in ranks whose environment says RANK, WORLD_SIZE and LOCAL_RANK.

A launch carries `work` and `cfg` unopened and returns what rank 0's work returned.

How a launcher of ours makes a process is its start_method: "spawn" is a fresh interpreter that imports everything itself;
"fork" is a copy of this process, and "forkserver" a copy of a helper without threads or GPUs. Copies share one import of torch.
"""

import atexit
import gc
import importlib
import multiprocessing
import os
import sys
import uuid

from lockstep import rendezvous, signals
from lockstep.refusal import Refusal

# What a rank goes on to import, so that it is imported once, before ranks are forked.
NEEDED = ["torch.utils.tensorboard", "tqdm", "hydra.utils", *(f"lockstep.{room}" for room in ("average", "board", "lock", "snapshot", "world"))]


def import_once(start_method):
    """Have what every rank imports imported by whatever they are forked from; the fork server does it while we go on.

    Raises Refusal for a start_method there is not; None is a launch that makes no processes.
    """
    if start_method not in (None, "spawn", "fork", "forkserver"):
        raise Refusal(f"launch.start_method={start_method} is none of Python's; type launch.start_method=spawn, fork or forkserver")
    if start_method == "forkserver":
        multiprocessing.set_forkserver_preload(["lockstep.mortal", *NEEDED])
        multiprocessing.forkserver.ensure_running()
    elif start_method == "fork":
        for name in NEEDED:
            importlib.import_module(name)


def env(work, cfg):
    """Join what torchrun, srun or mpirun describe; alone if nobody describes anything."""
    if rendezvous.read().starter != "nobody":
        signals.end_with_parent()
    return work(cfg)


def torchrun(work, cfg, start_method, nproc_per_node, max_restarts):
    """Start torch's elastic agent in this process and `nproc_per_node` ranks under it, on one machine.

    Workers that die are restarted together up to `max_restarts` times, and go on from the latest snapshot.
    """
    refuse_nesting("torchrun")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        run_id=uuid.uuid4().hex, min_nodes=1, max_nodes=1, nproc_per_node=nproc_per_node, max_restarts=max_restarts, monitor_interval=0.1,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method=start_method, local_addr="127.0.0.1",
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    )  # fmt: skip
    try:
        return elastic_launch(config, _rank)(work, cfg)[0]
    except SignalException as asked:
        raise signals.Stopped(f"asked to stop ({asked.sigval.name})") from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message if isinstance(failure.message, str) else failure.message.get("message", "")
        raise _failure(rank, failure.exitcode, message) from None


def _rank(work, cfg):
    """A worker of the in-process agent; what it returns reaches the agent."""
    gc.freeze()  # the collector writes to what it looks at, and a copy's memory is shared until it is written to
    signals.end_with_parent()
    try:
        value = work(cfg)
    except signals.Stopped:
        _flush()
        os._exit(signals.RESUMABLE)  # a worker that returns early keeps its agent waiting for 30 s
    _leave_at_exit()
    return value


def spawn(work, cfg, start_method, nproc_per_node, nnodes, node_rank, master_addr, master_port):
    """torch.multiprocessing on this node, and the same command on each of `nnodes` nodes with its own `node_rank`.

    master_addr:master_port: where node 0 listens; port 0 picks a free one and is for one node only.
    """
    refuse_nesting(start_method if start_method == "fork" else "spawn")
    if start_method == "fork" and nnodes > 1:
        raise Refusal("launch=fork is for one machine, since parents that meet have threads, which no fork survives; type launch=spawn")
    import torch.multiprocessing as mp

    node = spawn_node(nnodes, node_rank, master_addr, master_port)
    answer, answers = mp.Pipe(duplex=False)
    described = dict(
        WORLD_SIZE=nnodes * nproc_per_node, LOCAL_WORLD_SIZE=nproc_per_node, GROUP_RANK=node_rank,
        MASTER_ADDR=master_addr, MASTER_PORT=node.master_port, TORCHELASTIC_USE_AGENT_STORE=True, LOCKSTEP_STARTER="spawn",
    )  # fmt: skip
    ranks = mp.start_processes(
        _spawned_rank, (work, cfg, node_rank * nproc_per_node, described, answers), nproc_per_node, join=False, start_method=start_method
    )
    try:
        rendezvous.store(node)  # not before: a fork copies locks that the store's thread may hold, and nobody would ever release the copies
    except BaseException:
        for process in ranks.processes:
            process.kill()
        raise
    try:
        with signals.passed_on(ranks.pids()):
            while not ranks.join():
                pass
    except mp.ProcessExitedException as error:
        raise _failure(node_rank * nproc_per_node + error.error_index, error.exit_code, str(error)) from None
    except mp.ProcessRaisedException as error:
        raise _failure(node_rank * nproc_per_node + error.error_index, 1, str(error).strip()) from None
    finally:
        if start_method == "fork":
            rendezvous.store.cache_clear()  # ends its thread: a sweep forks again
    return answer.recv() if answer.poll() else None


def spawn_node(nnodes, node_rank, master_addr, master_port):
    """A parent's place among the nodes' parents, who share the clock and whose first hosts the ranks' store.

    Raises Refusal where several nodes are given no port to meet at.
    """
    if nnodes > 1 and not master_port:
        raise Refusal("launch=spawn on several nodes needs a port that all know; type launch.master_port=29500 on each")
    if not 0 <= node_rank < nnodes:
        raise Refusal(f"launch.node_rank={node_rank} does not fit launch.nnodes={nnodes}; type launch.node_rank=0 to {nnodes - 1}")
    port = master_port or rendezvous.free_port()
    return rendezvous.Ranks(rank=node_rank, size=nnodes, starter="spawn", master_addr=master_addr, master_port=port)


def _spawned_rank(index, work, cfg, first_rank, described, answers):
    os.environ.update({key: str(value) for key, value in described.items()}, RANK=str(first_rank + index), LOCAL_RANK=str(index))
    value = _rank(work, cfg)
    if first_rank + index == 0:
        answers.send(value)


def _leave_at_exit():
    """Skip the interpreter's teardown after success: gloo's threads abort it now and then, and a finished run would fail."""
    _flush()
    atexit.register(os._exit, 0)


def _flush():
    sys.stdout.flush()
    sys.stderr.flush()


def refuse_nesting(name):
    """Raise Refusal where these processes were started as ranks already."""
    starter = rendezvous.read().starter
    if starter != "nobody":
        raise Refusal(f"launch={name} inside {starter} would start every rank several times; type launch=env, or leave {starter} out")


class RankFailed(Exception):
    """A rank this process started has failed. `code` is its exit status."""

    def __init__(self, rank, code, message):
        super().__init__(message)
        self.rank, self.code = rank, code


def _failure(rank, code, message):
    """The exception a parent raises for a rank's: a refusal stays a refusal, whoever said it."""
    if code == signals.RESUMABLE:
        return signals.Stopped(f"rank {rank} stopped early")
    if "Refusal: " in message:
        return Refusal(message.rsplit("Refusal: ", 1)[1].splitlines()[0])
    return RankFailed(rank, code, f"rank {rank} failed first (exit {code}): {message}")
