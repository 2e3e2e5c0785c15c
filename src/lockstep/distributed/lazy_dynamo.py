"""A stand-in for torch._dynamo, which is imported when something is compiled and not before.

The import takes half of the time to a first step. Every optimizer, DistributedDataParallel and torchvision import
torch._dynamo, 1.5 seconds and 100 MB a rank, most of them only to exclude themselves from torch.compile. The stand-in
has the functions that they call, and the real module replaces it when another attribute is needed.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

NAME = "torch._dynamo"
UTILS = f"{NAME}.utils"


def postpone_dynamo() -> None:
    """From here on torch._dynamo is imported when something is compiled, and not before."""
    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = stand_in = DynamoStandIn(NAME)
        sys.modules[UTILS] = stand_in.utils


class DynamoStandIn(ModuleType):
    """torch._dynamo as torch's eager code uses it. Any other attribute imports the real module."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.disabled_by_torch: list[Callable[..., Any]] = []
        self.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
        self.utils = UtilsStandIn(self._import_real)

    def graph_break(self, msg: str = "") -> None:
        """Nothing is traced, so there is no graph to break."""

    def disable(
        self, fn: Any = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True
    ) -> Any:
        """As torch._dynamo.disable: a function, or a decorator if `fn` is None. Nothing is compiled yet: `fn` runs.

        A decorated function asks the real module as soon as that is imported.
        """
        options: dict[str, Any] = {"recursive": recursive, "reason": reason, "wrapping": wrapping}
        if fn is None:
            return functools.partial(self.disable, **options)
        if isinstance(fn, (type, torch.nn.Module)):  # the real module changes or replaces these
            return self._import_real().disable(fn, **options)
        if not wrapping:  # torch's own decorator, which stores the answer on the function
            self.disabled_by_torch.append(fn)
            return fn
        return self._run_eagerly(fn, options)

    def _run_eagerly(self, fn: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        disabled: Callable[..., Any] | None = None

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal disabled
            if sys.modules.get(NAME) is self:
                return fn(*args, **kwargs)
            if disabled is None:
                disabled = importlib.import_module(NAME).disable(fn, **options)
            return disabled(*args, **kwargs)

        run._torchdynamo_disable = True  # type: ignore[attr-defined]  # by this mark the real module knows it
        run._torchdynamo_disable_msg = options["reason"]  # type: ignore[attr-defined]
        return run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # __path__: a submodule is being imported
            raise AttributeError(name)
        return getattr(self._import_real(), name)

    def _import_real(self) -> Any:
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME], sys.modules[UTILS], torch._dynamo
            for function in self.disabled_by_torch:  # torch must ask the real module again
                getattr(function, "__dict__", {}).pop("__dynamo_disable", None)
        return importlib.import_module(NAME)


class UtilsStandIn(ModuleType):
    """torch._dynamo.utils as torch's eager code and torchvision use it. import_real: returns torch._dynamo."""

    def __init__(self, import_real: Callable[[], Any]) -> None:
        super().__init__(UTILS)
        self._import_real = import_real

    def get_optimize_ddp_mode(self) -> str:
        """The real module's default, which changes nothing in DistributedDataParallel."""
        return "ddp_optimizer"

    def is_compile_supported(self, device_type: Any) -> Any:
        """torchvision.ops imports this function, and calls it in detection models."""
        return self._import_real().utils.is_compile_supported(device_type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._import_real().utils, name)
