"""Imported first by the server that ranks are forked from: the server ends with its launcher, and the ranks with it."""

from lockstep.distributed.host import end_with_parent

end_with_parent()
