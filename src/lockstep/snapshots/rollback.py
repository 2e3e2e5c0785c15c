"""`watch.nan=rollback`: a run whose batch gave a NaN goes back to its newest snapshot and leaves out that batch."""

import logging

from lockstep.errors import TrainingDiverged
from lockstep.snapshots.manager import SnapshotManager
from lockstep.training.state import TrainState

log = logging.getLogger(__name__)

ROLLBACKS_IN_A_ROW = 3  # at steps that follow each other; more of them mean that the weights are bad, not a batch


class Rollback:
    """Brings `state` back to the newest snapshot, in place. Every rank calls it with the same error."""

    def __init__(self, state: TrainState, snapshots: SnapshotManager) -> None:
        self.state, self.snapshots = state, snapshots
        self.last_bad_step, self.in_a_row = -1, 0

    def __call__(self, error: TrainingDiverged) -> None:
        """Raises `error` itself if `watch.nan` is another, without a snapshot, and after a few rollbacks in a row."""
        nan = self.state.nan
        if nan.action != "rollback" or error.step is None:
            raise error
        self.in_a_row = self.in_a_row + 1 if error.step <= self.last_bad_step + 1 else 1
        self.last_bad_step = error.step
        if self.in_a_row > ROLLBACKS_IN_A_ROW:
            raise error
        self.state.average_replicas()  # gradient_sync=local_sgd counts its steps from here, as after a resume
        if self.snapshots.resume(self.snapshots.resumed_from) is None:
            raise error
        self.state.optimizer.zero_grad(set_to_none=True)  # the next backward pass would add to the broken gradient
        nan.leave_out(error.step)
        step = self.state.progress.step
        log.warning("%s; back to step %d, and step %d will leave out its batch", error, step, error.step)
