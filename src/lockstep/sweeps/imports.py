"""What each job needs, imported and made once: the server that jobs are forked from imports this module, and torch."""

# ruff: noqa: F401

import hydra.main
from hydra.core.plugins import Plugins

import lockstep.cli
import lockstep.launchers.rank_imports
import lockstep.preflight
import lockstep.sweeps.launch
import lockstep.tasks.reports
from lockstep.config.check import adapter
from lockstep.config.schema import RunConfig

Plugins.instance()  # Hydra looks for plugins
adapter(RunConfig)  # pydantic reads the types of a config
