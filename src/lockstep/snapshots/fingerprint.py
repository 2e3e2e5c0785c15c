"""A hash of a data set: another run, another rank or a resumed run shall see that its data is another one."""

from typing import Any

import numpy as np
import torch

from lockstep.data.source import Tensors, of_each_sample, unwrapped
from lockstep.files import short_hash

LARGEST_TENSOR = 2**30  # bytes; a larger one may be a file that is mapped into memory, and is sampled
TENSOR_ROWS = 64  # sampled of such a tensor


def data_fingerprint(dataset: Any) -> str:
    """A hash of a data set, and what it covers: "0123456789abcdef of all samples and targets".

    In memory every bit counts, or of more than `LARGEST_TENSOR` bytes some rows. A data set may have it as its
    attribute `fingerprint`. Elsewhere the length counts, and the attributes `files` and `targets`: random transforms
    change the samples. The hash of a part is that of the whole.
    """
    whole = unwrapped(dataset)[0]
    weights, own, covers = of_each_sample(whole, "weights"), getattr(whole, "fingerprint", None), ""
    if isinstance(own, str):
        found = own
    elif isinstance(whole, Tensors):
        tensors, length, covers = [whole.inputs.detach(), whole.targets.detach()], len(whole), "all samples and targets"
        described = [(str(tensor.dtype), list(tensor.shape)) for tensor in tensors]
        if max(tensor.nbytes for tensor in tensors) > LARGEST_TENSOR:
            count = min(TENSOR_ROWS, length)
            rows = torch.arange(count) * length // count
            tensors = [tensor[rows.to(tensor.device)] for tensor in tensors]
            covers = f"{count} of {length} samples and targets"
        values = (tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
        found = f"{short_hash(described, *values)} of {covers}"
    else:
        named = {"files": getattr(whole, "files", None), "targets": of_each_sample(whole, "targets")}
        kept = {name: each for name, each in named.items() if isinstance(each, np.ndarray) and each.dtype.kind != "O"}
        bits = [(name, each.tobytes()) for name, each in kept.items()]
        found = f"{short_hash((len(whole), bits))} of {' and '.join(['the length', *kept])}"
    return found if weights is None else f"{found}, weights {short_hash(np.asarray(weights, np.float64).tobytes())}"
