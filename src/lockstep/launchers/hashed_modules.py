"""Imported last by the process that ranks are forked from: it looks at the loaded modules once for all of them."""

from lockstep.source_code import module_hashes

module_hashes()
