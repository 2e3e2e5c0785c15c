"""What each job needs, imported and made once: the server that jobs are forked from imports this module, and torch."""

# ruff: noqa: F401

import hydra.main
import pydantic.type_adapter
from hydra.core.plugins import Plugins

import lockstep.cli
import lockstep.launchers.rank_imports
import lockstep.preflight
import lockstep.sweeps.launch
import lockstep.tasks.reports

Plugins.instance()  # Hydra looks for plugins
