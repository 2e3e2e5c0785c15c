"""What the end of a rank means in plain words, and what to type."""

import re
import signal
from collections.abc import Mapping
from typing import Any

from lockstep.files import is_project

# The words of the CPU's allocator, whose error has no type of its own, of C++, of oneDNN and of the system.
OUT_OF_MEMORY = "MemoryError|allocate memory|out of memory|bad_alloc|could not create a memory"
SHAPES = "shapes cannot be multiplied|must match the size|size mismatch|expected input|invalid for input of size"
SHAPES += "|Expected .*dimension|doesn't match the broadcast shape|shape mismatch|normalized_shape"
IMAGE_SIZE = r"Output size is too small|Kernel size can't be greater|match model \(\d|Wrong image (height|width)"
NUMBERS = r"dtype.* got (UInt\d+|Bool|Short|Int|Long|Char) |Input type \((short|int|long|unsigned|bool)"
NUMBERS += r"|not implemented for '(UInt\d+|Bool)"
SHARDS = "fully_shard doesn't support|FSDP expects|_chunk_cat expects|on ScriptModules|param must be a Parameter"
SHARDS += "|parameter name can|sharding strategy|Sharding propagation|mixed torch.Tensor and DTensor|placement changes"

# Exception type or words of its message -> what it means, and what to type or do. They choose an explanation only.
MEANINGS: dict[str, tuple[str, str]] = {
    OUT_OF_MEMORY: (
        "this rank has no memory left",
        "type trainer.gradient_accumulation_steps=<more>, trainer.checkpoint_activations=[<blocks>] or a smaller batch",
    ),
    r"</torch_\d+.*No space left on device": (
        "the memory that processes share, /dev/shm, is full: a process that loads data passes its samples on there",
        "give it more, as docker run --shm-size=8g does, or type loader.num_workers=0",
    ),
    "No space left on device": ("the disk is full", "free some space, or type hydra.run.dir=<another disk>"),
    "Too many open files": (
        "this process may open no more files and connections",
        "type ulimit -n 65536 before the command; if that is refused, fewer loader.num_workers",
    ),
    SHAPES: ("the shapes of the data and of the model do not fit together", "change either at the line above"),
    IMAGE_SIZE: (
        "the images are too small for the net, or it is made for another size",
        "give it larger ones, or make it for these: type +model.image_size=<pixels> for a vision transformer of "
        "torchvision, +model.img_size=<pixels> for one of timm",
    ),
    NUMBERS: (
        "the model got whole numbers or truth values, and computes with fractions; only samples of uint8 are scaled",
        "return floats from __getitem__, such as x.astype(numpy.float32), or change the type at the line above",
    ),
    "Expected more than 1 value per channel": (
        "batch norm has one value to normalise: the last batch of an epoch, or a rank's share of it, is one sample",
        "type trainer.batch_size=<a number that leaves no single sample over>, and with several ranks sync_bn=on",
    ),
    r"Target \d+ is out of bounds|index out of range in self|device-side assert triggered": (
        "an index is larger than the table that it looks up: the model has fewer outputs than there are classes, a "
        "target is beyond them, or a token beyond the embedding",
        "give the model dataset.classes outputs; if it has them, check the targets of the samples above",
    ),
    SHARDS: ("this strategy cannot cut the model, or the optimizer cannot step on parts", "type strategy=ddp"),
    "argument: 'closure'|SparseAdam does not|Muon only supports": (
        "this optimizer computes the loss by itself, or takes other weights or gradients than these",
        "type optimizer=adamw or optimizer=muon, or write a step of your own, see docs/experiments.md",
    ),
    "on meta tensors": (
        "strategy=pipeline finds shapes without values, and the model decides by a value",
        "type strategy=fsdp, or write the decision by torch.where",
    ),
    "Expected to have finished reduction": ("weights got no gradient", "type strategy.find_unused_parameters=true"),
    "modified by an inplace operation": (
        "the model changes a value in place that its backward pass still needs",
        "write x = x + y in place of x += y, and inplace=False; torch.autograd.set_detect_anomaly(True) shows where",
    ),
    "not require grad and does not have a grad_fn": (
        "the loss depends on no weight that is trained",
        "take detach(), torch.no_grad() and item() out of what the loss is made of, or freeze fewer weights",
    ),
    "Expected to mark a variable ready only once": (
        "a weight got its gradient twice in one backward pass, as from torch.utils.checkpoint with use_reentrant=True",
        "type strategy.find_unused_parameters=false, or pass use_reentrant=False to checkpoint",
    ),
    "worker.* (killed|exited)": ("a process that loads data has ended", "type loader.num_workers=0 to see its error"),
    "Cannot re-initialize CUDA|not compiled with CUDA|no NVIDIA driver|No CUDA GPUs": (
        "the code uses a GPU, and this rank has none, or is a copy of a process that used it before",
        "take the device of the inputs at the line above; if there are GPUs, type backend=nccl launch=spawn",
    ),
}
LOST_RANK = (
    "raised where ranks wait for each other: another rank or its machine is lost or did not answer within "
    "backend.timeout, or the call at this line has a mistake of its own",
    "look at the other ranks' logs, then at this line; type backend.timeout=<more seconds> if a rank was only slow",
)
OF_PROJECT = "the code of Lockstep raised this exception", "see whether the values at this line are yours, and right"
OF_NODE = (
    "what a _target_ of the config names, or what that calls, raised this exception",
    "correct the values beside that _target_; the command with --cfg job shows them",
)
OF_USER = "the code at this line raised this exception", "correct its cause, then type the command again"
NO_MEMORY = (
    "the system killed it: the machine, container or job has no memory left",
    "type trainer.batch_size=<half>, or give the job more memory (for Slurm: --mem)",
)
SIGNALS = {
    "SIGKILL": ("killed, cause not known", "look in the system's log (dmesg, journalctl) for who did so, then resume"),
    "SIGSEGV": ("native code crashed (segmentation fault)", "the Python stack above shows the call that crashed"),
    "SIGBUS": ("native code crashed (bus error), as when /dev/shm or a mapped file is full", "free some space there"),
    "SIGTERM": ("another program asked it to end (SIGTERM)", "resume when that program allows it"),
    "SIGABRT": (
        "native code ended the process (abort): its memory is damaged if glibc's words are on the screen (corrupted, "
        "double free, invalid pointer); else as gloo does when ranks give other shapes to one collective",
        "look for a condition on the rank or its data before a collective; if memory is damaged, type MALLOC_CHECK_=3; "
        "if the screen says Too many open files, type ulimit -n 65536",
    ),
}


def known_meaning(failure: Mapping[str, Any]) -> tuple[str, str] | None:
    """(what it means, what to type) of an exception that is often met. failure: see lockstep.failures.record."""
    words = f"{failure['type']}: {failure['message']}"
    return next((meaning for pattern, meaning in MEANINGS.items() if re.search(pattern, words)), None)


def explain_exception(failure: Mapping[str, Any]) -> tuple[str, str]:
    """(what it means, what to type) in plain words."""
    file = failure.get("file", "")
    of_node = OF_NODE if file.endswith("lockstep/config/check.py") else OF_PROJECT
    of_code = of_node if is_project(file) else OF_USER
    return known_meaning(failure) or (LOST_RANK if failure["is_echo"] else of_code)


def explain_exit(code: int | None, phase: str, out_of_memory: bool) -> tuple[str, str, str]:
    """(short name, what it means, what to type) of a process that ended without a word. code: as Python's subprocess
    has it, None if it is not known. out_of_memory: whether the kernel has killed for want of memory."""
    if code is not None and code >= 0:
        meaning = f"its program left with exit code {code} before the end of the run, in the phase {phase!r}"
        return f"exit code {code}", meaning, "remove the call of exit() in your code, or raise an exception there"
    number = signal.SIGKILL if code is None else -code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    meaning, advice = SIGNALS.get(name, (f"ended by {name}, cause not known", "resume"))
    if name == "SIGKILL" and out_of_memory:
        meaning, advice = NO_MEMORY
    elif code is None:
        name, meaning = "its starter has taken the exit code", f"{meaning}; or it left by a call of exit()"
    return name, meaning, advice
