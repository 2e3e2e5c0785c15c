"""Large tensors in temporary files that are mapped into memory: where that is short, they are moved to the disk."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

LARGE = 2**25  # bytes


def on_disk(tensor: Tensor) -> Tensor:
    """A copy of a large CPU tensor in a file, which is gone when the copy is. Other tensors as they are.

    So are all if there is no room in the folder for temporary files, which TMPDIR names.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < LARGE:
        return tensor
    try:
        with tempfile.NamedTemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # later a full disk would kill the process
            mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    except OSError:
        return tensor
    return mapped.view(tensor.shape).copy_(tensor)


@contextmanager
def parameters_on_disk() -> Iterator[None]:
    """Inside the block a large parameter is moved to the disk as soon as a module gets it, before it is initialised.

    A model larger than the memory can be built so, with the numbers of any other. It is for models that are cut soon:
    a step on such parameters would write them to the disk.
    """
    handle = register_module_parameter_registration_hook(_move)
    try:
        yield
    finally:
        handle.remove()


def _move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is not None and not is_lazy(parameter) and parameter.untyped_storage().filename is None:
        parameter.data = on_disk(parameter.data)
