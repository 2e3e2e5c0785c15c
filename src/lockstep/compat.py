"""Every private name of torch, Hydra, OmegaConf and Python's library that this project uses.

Each with the reason, the version that it was seen in, and what happens where it is missing. Libraries are imported
inside the functions: `--help` answers without torch.
"""

import sys

# torch 2.14.1

# Functions of torch whose frames tell what a rank waits for. With other names the verdict on a hang is less precise.
BACKWARD = "_engine_run_backward"  # torch.autograd.graph: a backward pass, in which DistributedDataParallel waits
GROUP_MAKERS = ("_store_based_barrier", "_create_gloo_process_group")  # a new process group: ranks meet at the store


def flight_records() -> list[bytes]:
    """torch's records of the last collectives of this process, each as JSON: gloo's, and NCCL's in one of its own.

    For the verdict on a hang; none where this torch has none. Without stacks: torch looks up their lines while it
    holds the recorder's lock, which takes a second.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")  # an import could wait for an import that hangs
    records = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        try:
            records.append(bytes(getattr(c10d, name)(includeCollectives=True, onlyActive=False)))
        except (AttributeError, RuntimeError, TypeError):
            continue
    return records
