"""The sweeper and the launcher of this project, as plugins of Hydra, which finds plugins in this namespace only.

Every command imports this module, so it imports what a sweep needs inside its functions.
"""

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LockstepLauncher(Launcher):
    """Runs each job of a sweep in a process of its own, and keeps the table of the sweep."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task_function, self.config = hydra_context, task_function, config
        self.opened: Any = None  # the sweep, after the first `launch`

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """For a sweeper of Hydra's, such as Optuna's: run these jobs, and return what they returned."""
        from hydra_plugins.lockstep_sweeper._jobs import launch_jobs

        return launch_jobs(self, job_overrides)


class LockstepSweeper(BasicSweeper):
    """Runs the jobs that a command lists, and keeps their table."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.task_function = task_function

    def sweep(self, arguments: list[str]) -> Any:
        from hydra_plugins.lockstep_sweeper._jobs import sweep_over

        return sweep_over(self, [*self._parse_config(), *arguments])
