"""Imported first by the server that ranks are forked from: the server ends with its launcher, and the ranks with it."""

import os
import signal

from lockstep.distributed.host import LAUNCHER, end_with_parent

# The pid tells of a launcher that has ended before this line. Without it the server would import torch to its end.
launcher = int(os.environ.pop(LAUNCHER, 0)) or None
end_with_parent(signal.SIGKILL, launcher)  # other signals are blocked, see lockstep.launchers.processes.preload
