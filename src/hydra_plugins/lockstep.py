"""The launcher and the sweepers of this project, as plugins of Hydra, which finds plugins in this namespace only.

Every command imports this module, so it imports what a sweep needs inside its functions. The arguments of the
constructors are the keys of hydra.launcher and hydra.sweeper, where `Sweep` and `Search` read them.
"""

from collections.abc import Mapping, Sequence

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from lockstep.compat import basic_sweeper
from lockstep.config.schema import Count, Node, Whole


class LockstepLauncher(Launcher):
    """Runs each job as a command of its own. A sweeper may call `launch` several times. See conf/hydra/launcher."""

    def __init__(self, n_jobs: Count, retries: Whole, max_failures: Count | None) -> None:
        pass

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from lockstep.sweeps.launch import Sweep

        self.sweep = Sweep(hydra_context.config_loader, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self.sweep.launch(job_overrides)


class ListSweeper(basic_sweeper()):  # type: ignore[misc]
    """Hydra's own, for lists of values."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """The launcher composes and checks each job."""


class OptunaSweeper(Sweeper):
    """Searches with Optuna. See conf/hydra/sweeper/optuna.yaml."""

    def __init__(self, n_trials: Count, sampler: Node, pruner: Node | None, params: Mapping[str, str] | None) -> None:
        pass

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader, self.master = hydra_context.config_loader, config

    def sweep(self, arguments: list[str]) -> None:
        from lockstep.sweeps.search import Search

        Search(self.loader, self.master).search()
