"""What each job needs, imported and made once: the server that jobs are forked from imports this module, and torch."""

# ruff: noqa: F401

import os
import signal

from lockstep.distributed.host import LAUNCHER, end_with_parent

if LAUNCHER in os.environ:  # this is the server
    # It ends with its sweep, and the jobs with it: other signals are blocked, see lockstep.sweeps.jobs. The pid tells
    # of a sweep that has ended before this line.
    end_with_parent(signal.SIGKILL, int(os.environ.pop(LAUNCHER)))

import hydra.main
import pydantic.type_adapter
from hydra.core.plugins import Plugins

import lockstep.cli
import lockstep.launchers.rank_imports
import lockstep.preflight
import lockstep.sweeps.launch
import lockstep.tasks.reports

Plugins.instance()  # Hydra looks for plugins
