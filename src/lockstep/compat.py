"""Every private name of Python's library, Hydra, OmegaConf, Optuna and torch that this project uses, in this order.

Each function says why the name is needed, and what happens where it is missing. They were seen in Python 3.11, Hydra
1.3.8 and 1.4.0rc3, OmegaConf 2.3.1 and 2.4.1rc1, Optuna 5.0 and torch 2.14.1; what differs between two versions is
here, too, though it is public. The imports are inside the functions: `--help` must not import torch.
"""

import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import path_value
from lockstep.files import ROOT

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor


def remove_temporary_folder() -> None:
    """Remove the folder in TMPDIR that multiprocessing has made, when nothing is left of this process but to exit:
    Python does so while the interpreter is torn down, which this project's processes skip. Missing: it stays."""
    process = sys.modules.get("multiprocessing.process")  # else nobody has made one
    folder = getattr(process.current_process(), "_config", {}).get("tempdir") if process else None
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def hydra_version_base() -> dict[str, str]:
    """The argument `version_base` of Hydra's functions: without it 1.3 warns, and with it 1.4 does."""
    import hydra

    return {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


@contextmanager
def hydra_composed(words: Sequence[str], folders: Iterable[Path] = ()) -> "Iterator[DictConfig]":
    """What Hydra composes of the overrides among the words, as `main` gets it. folders: of other configs. In the block
    HydraConfig is of it. Then Hydra knows again what it knew, such as of a `hydra.main` around this."""
    import copy

    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.version import VersionBase
    from omegaconf import open_dict

    before, base, known = GlobalHydra.instance(), VersionBase.instance(), HydraConfig.instance().cfg
    GlobalHydra.set_instance(copy.copy(before))
    GlobalHydra.instance().clear()
    VersionBase.set_instance(copy.copy(base))
    overrides = ["hydra.runtime.output_dir=${hydra:run.dir}", *[one for one in words if not one.startswith("-")]]
    if searched := ",".join(path_value(f"file://{folder.resolve()}") for folder in folders):
        overrides.append(f"hydra.searchpath=[{searched}]")
    try:
        with hydra.initialize_config_dir(str(ROOT / "conf"), **hydra_version_base()):
            cfg = hydra.compose("config", overrides=overrides, return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        yield cfg
    finally:
        GlobalHydra.set_instance(before)
        VersionBase.set_instance(base)
        HydraConfig.instance().cfg = known


def hydra_may_call_all() -> dict[str, object]:
    """The argument of `hydra.utils.instantiate` with which 1.4 calls any target, as 1.3 does, and does not warn.
    Missing, as in 1.3: no argument."""
    import hydra.utils

    policy = getattr(hydra.utils, "UNSAFE_DISABLE_EXECUTION_CHECKS", None)
    return {} if policy is None else {"_execution_whitelist_": policy}


def basic_sweeper() -> Any:
    """The class of Hydra's sweeper over lists, which composes each job to see whether it can. Missing: no sweep."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    return BasicSweeper


def register_resolver(name: str, function: Callable[..., object]) -> None:
    """`${name:...}` in a config calls `function`. 2.4 has another name for the function, and warns."""
    import omegaconf

    is_old = omegaconf.__version__.startswith("2.3.")
    register = getattr(omegaconf.OmegaConf, "register_new_resolver" if is_old else "register_resolver")
    register(name, function, replace=True)


def open_trial(study: Any, trial: Any) -> Any:
    """A running trial of a study that was loaded, to which values can be reported. Missing: an AttributeError."""
    import optuna

    return optuna.Trial(study, trial._trial_id)


@contextmanager
def hidden_from_profiler() -> Iterator[None]:
    """For the start of a collective that may end after torch's profiler has stopped: gloo's thread writes the end of a
    recorded one into the profiler's memory, which is freed by then. Missing: an ImportError."""
    from torch.autograd import _enable_record_function

    _enable_record_function(False)
    try:
        yield
    finally:
        _enable_record_function(True)


def dispatch_mode() -> Any:
    """The class of blocks that see each of torch's operators, collectives too. Missing: an ImportError."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def offsets_of_part(tensor: "DTensor") -> tuple[int, ...]:
    """Where this rank's part of `tensor` begins in each dimension, which two meshes can cut. Missing: an ImportError,
    and no sharded snapshot can be written or read."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def quiet_redistribution() -> None:
    """No warning that tensors which two meshes cut are gathered in two steps. Missing: torch warns at each snapshot."""
    import logging

    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


# Files and functions of torch whose frames tell what a rank waits for. With other names the verdict on a hang, and who
# failed first, are less certain.
COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/")  # a rank that compiles is only slow
CALLED_OPERATOR = "/torch/_ops.py"  # between the code of a collective and C++
GENERATED = "/torchinductor_"  # the folder of compiled code, which may hold collectives
BACKWARD = "_engine_run_backward"  # torch.autograd.graph: a backward pass, in which DistributedDataParallel waits


def flight_records() -> list[bytes]:
    """torch's records of the last collectives of this process, each as JSON: gloo's, and NCCL's in one of its own.
    Without stacks: torch looks up their lines while it holds the recorder's lock, for a second. Missing: none."""
    c10d = sys.modules.get("torch._C._distributed_c10d")  # an import could wait for an import that hangs
    records = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        try:
            records.append(bytes(getattr(c10d, name)(includeCollectives=True, onlyActive=False)))
        except (AttributeError, RuntimeError, TypeError):
            continue
    return records


def with_versions(weights: "Mapping[str, Tensor]", model: "nn.Module") -> "dict[str, Tensor]":
    """A state dict with the versions of the model's layers, without which some refuse it, such as torchvision's
    MNASNet. Missing: an AttributeError."""
    whole: Any = OrderedDict(weights)
    whole._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]
    return whole  # type: ignore[no-any-return]


def has_gradient_hooks(tensor: Any) -> bool:
    """Whether `register_hook` or `register_post_accumulate_grad_hook` was called on a weight. Missing: no, and
    strategies that make other weights of a model's go on without the hooks."""
    return any(getattr(tensor, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def plain_functions() -> AbstractContextManager[None]:
    """In the block no torch.overrides.TorchFunctionMode sees torch's functions: not those that draw for a sample.
    Missing: an AttributeError from the hook of gradient_sync=powersgd."""
    import torch

    block: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return block


def is_of_transform(tensor: Any) -> bool:
    """Whether a tensor exists inside of torch.func.vmap, grad and such alone, where nobody may ask for its values.
    Missing: an ImportError in mode=check."""
    from torch._C._functorch import is_functorch_wrapped_tensor

    return bool(is_functorch_wrapped_tensor(tensor))


def decoded_jpeg(stored: bytes) -> "Tensor | None":
    """The pixels (C, H, W) uint8 of a JPEG, turned as its EXIF tag says: those of Pillow, in half of its time. Missing:
    None, and Pillow decodes it. torchvision warns of the function around this operator."""
    import torch
    import torchvision  # noqa: F401

    with suppress(AttributeError, RuntimeError):  # the file is damaged
        found: Tensor = torch.ops.image.decode_jpeg(torch.frombuffer(bytearray(stored), dtype=torch.uint8), 0, True)
        return found
    return None
