"""The entry point of Lockstep.

python src/train.py
torchrun --standalone --nproc_per_node=2 src/train.py backend=gloo trainer.epochs=10
python src/train.py -m launch=torchrun optimizer.lr=0.1,0.01
"""

if __name__ == "__main__":
    from lockstep.distributed.signals import end_at_signals

    end_at_signals()  # before the other imports: Ctrl-C shows no traceback while they are loaded

import sys
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lockstep import cli
from lockstep.compat import hydra_version_base
from lockstep.config.check import check, with_own_arguments
from lockstep.config.record import record_config, typed_overrides
from lockstep.distributed.run_folder import require_same_run
from lockstep.errors import exits_are_failures


@hydra.main(**hydra_version_base(), config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> Any:
    """Check the config, then train in every rank, or do what `mode` says. Returns the objective, for a sweeper."""
    with cli.exit_codes(), exits_are_failures("the command left before the training"):
        cfg = with_own_arguments(cli.with_values_of_run(cfg), typed_overrides(HydraConfig.get()))
        config = check(cfg)
        record = record_config(cfg, config, HydraConfig.get(), sys.argv)
        require_same_run(record, config.run_dir)
        from lockstep.build import preflight  # imports torch

        parts = preflight(config)
        if parts.mode.starts_ranks:  # itself
            return parts.mode.work(config, record, parts)
        return parts.launcher.launch(parts.mode.work, config, record, parts)


if __name__ == "__main__":
    cli.run(main)
