"""The entry point of Lockstep.

python src/train.py
torchrun --standalone --nproc_per_node=2 src/train.py backend=gloo trainer.epochs=10
python src/train.py -m launch=torchrun optimizer.lr=0.1,0.01

Functions import torch, and what needs it, inside: `--help` and `--cfg job` answer without torch.
"""

import os
import signal
import sys

if __name__ == "__main__":
    if sys.flags.safe_path:  # python -P
        sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))  # the next import takes 30 ms
    from lockstep.distributed.signals import end_at_signals

    end_at_signals()  # before the other imports: Ctrl-C shows no traceback while they are loaded

from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lockstep import cli
from lockstep.compat import hydra_version_base
from lockstep.config.check import check_arguments
from lockstep.config.record import record_config
from lockstep.config.targets import instantiate_as
from lockstep.distributed import signals
from lockstep.errors import exits_are_failures
from lockstep.launchers.base import Launcher
from lockstep.modes.base import Mode


@hydra.main(**hydra_version_base(), config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> Any:
    """Check the config, then train in every rank, or do what `mode` says. Returns the objective, for a sweeper."""
    with cli.errors_are_shown_once(), exits_are_failures("the command left before the training"):
        composed, cfg = cfg, cli.check_input(cfg)
        record = record_config(composed, cfg, HydraConfig.get(), sys.argv, cli.words_of_folders(sys.argv[1:]))
        signals.set_run_folder(cfg.run_dir)
        check_arguments(cfg, ("launch", "mode"))
        launcher, mode = instantiate_as(Launcher, cfg.launch, "launch"), instantiate_as(Mode, cfg.mode, "mode")
        if mode.starts_ranks:
            return mode.work(cfg, record)
        launcher.prepare("lockstep.rank_imports")
        from lockstep.preflight import preflight  # imports torch, while the fork server does the same

        cfg = preflight(cfg, launcher)
        cli.collect_garbage()
        return launcher.launch(mode.work, cfg, record)


if __name__ == "__main__":
    cli.run_main(main)
