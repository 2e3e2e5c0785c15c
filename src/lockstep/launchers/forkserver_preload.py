"""Imported first by the server that ranks are forked from: the server ends with its launcher, and the ranks with it."""

import signal

from lockstep.distributed.host import end_with_parent

end_with_parent(signal.SIGKILL)  # other signals are blocked, see lockstep.launchers.processes.preload
