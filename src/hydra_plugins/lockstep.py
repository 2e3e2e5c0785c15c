"""The launcher and the sweeper of this project, as plugins of Hydra, which finds plugins in this namespace only.

Every command imports this module, so it imports what a sweep needs inside its functions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class LockstepLauncher(Launcher):
    """Runs each job as a command of its own. A sweeper may call `launch` several times. See conf/hydra/launcher."""

    def __init__(self, n_jobs: int | str, retries: int, max_failures: int | None) -> None:
        pass  # `Sweep` reads them

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from lockstep.sweeps.launch import Sweep

        self.sweep = Sweep(hydra_context.config_loader, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self.sweep.launch(job_overrides)


class OptunaSweeper(Sweeper):
    """Searches with Optuna. See conf/hydra/sweeper/optuna.yaml."""

    def __init__(self, n_trials: int, sampler: Any, pruner: Any, params: Mapping[str, str] | None) -> None:
        keys = {"n_trials": n_trials, "sampler": sampler, "pruner": pruner}  # params: `Sweep` reads them
        self.keys: Any = OmegaConf.to_container(OmegaConf.create(keys))

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader, self.master = hydra_context.config_loader, config

    def sweep(self, arguments: list[str]) -> None:
        try:
            from lockstep.sweeps.search import Search
        except ModuleNotFoundError as error:
            from lockstep.errors import ConfigError

            raise ConfigError(f"hydra/sweeper=optuna needs {error.name}; type pip install optuna") from None
        Search(self.loader, self.master, **self.keys).search()
