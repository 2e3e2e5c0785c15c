"""What a run does not need is not imported: torch._dynamo, half of the time to a first step.

Every optimizer and DistributedDataParallel import it, 1.5 seconds and 100 MB a rank, only to tell torch.compile to leave
them alone. A stand-in tells them that nobody compiles, and makes way for the real module as soon as anybody asks for more.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import torch

NAME = "torch._dynamo"


def put_off_dynamo():
    """From here on torch._dynamo is imported when something is compiled, and not before."""
    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = StandIn(NAME)


class StandIn(ModuleType):
    """torch._dynamo as torch's eager code uses it; to ask for any other attribute of it imports the real one."""

    def __init__(self, name):
        super().__init__(name)
        self.left_alone = []
        self.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
        self.utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # its default, which asks DDP for nothing

    def graph_break(self):
        """Where nothing is traced there is nothing to break."""

    def disable(self, function, recursive=True, wrapping=True):
        self.left_alone.append(function)
        return function

    def __getattr__(self, name):
        if name.startswith("__") and name != "__path__":  # __path__: somebody imports a submodule
            raise AttributeError(name)
        return getattr(self._make_way(), name)

    def _make_way(self):
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME], torch._dynamo
            for function in self.left_alone:  # torch keeps our answer on the function, and the real one would answer otherwise
                vars(function).pop("__dynamo_disable", None)
        return importlib.import_module(NAME)
