"""Sends and receives between pairs of ranks, for the algorithms that are written out here."""

from torch.distributed import P2POp, batch_isend_irecv


def exchange(*operations: P2POp) -> None:
    """Run all operations at once and wait for them. One at a time, two ranks that send to each other would deadlock.

    Put receives first: gloo tells the peer on a connection that it may send, and would do so only after it has sent.
    """
    for work in batch_isend_irecv(list(operations)):
        work.wait()
