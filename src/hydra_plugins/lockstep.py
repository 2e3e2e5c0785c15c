"""The sweeper and the launcher of this project, as plugins of Hydra, which finds plugins in this namespace only.

Every command imports this module, so it imports what a sweep needs inside its functions.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from lockstep.sweeps.runner import OpenSweep


class LockstepSweeper(Sweeper):
    """Runs the jobs that a command lists, or those that `sweep.search` chooses, and keeps their table.

    max_batch_size: Hydra's own key, without a meaning here. params: {key: values}, as for Hydra's own sweeper.
    """

    def __init__(self, max_batch_size: int | None, params: Mapping[str, str] | None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> Any:
        from lockstep.sweeps.build_sweep import run_sweep

        assert self.hydra_context is not None
        assert self.config is not None
        words = [*(f"{key}={values}" for key, values in self.params.items()), *arguments]
        run_sweep(self.hydra_context, self.config, self.task_function, words)


class LockstepLauncher(Launcher):
    """For a sweeper of Hydra's, such as Optuna's: runs each job in a process of its own, and keeps the table."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config
        self.opened: OpenSweep | None = None  # after the first `launch`

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run these jobs, and return what they returned. The sweeper may call it several times."""
        from lockstep.sweeps.build_sweep import launch_jobs

        self.opened, returned = launch_jobs(
            self.hydra_context, self.config, self.task_function, job_overrides, self.opened
        )
        return returned
