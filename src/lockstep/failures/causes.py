"""Why a process ended, as far as the system confirms it, and what an exception means in plain words."""

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Errors of a rank whose peer is gone, or does not answer. Such an error is never the first one.
PEER_IS_GONE = re.compile(
    r"closed by peer|reset by peer|Connection closed|Broken pipe|is gone|Socket closed|Connection refused"
    r"|remote process exited|NCCL communicator was aborted|failed to recv, got 0 bytes|Stop_waiting response"
)
PEER_IS_SILENT = re.compile(
    r"Timed out waiting|timed out after|did not join the (?:rendezvous|others)|Watchdog caught", re.I
)
SILENT_RANK = re.compile(r"for rank (\d+)|rank (\d+) did not")

# Exception type or words of its message -> what it means, and what to type or do.
MEANINGS: tuple[tuple[str, str, str], ...] = (
    (r"^TrainingDiverged: ", "a loss, a gradient or a weight is not finite", "do what the message says, then resume"),
    (r"^RanksDiffer: ", "ranks that must hold the same weights do not", "do what the message says, then resume"),
    (
        r"expected input\[.*\] to have \d+ channels",
        "the images have another number of channels than the model was made for",
        "make the model for the channels of dataset.shape, or change the images in dataset.transforms and in "
        "dataset.test_transforms, for example with torchvision.transforms.v2.RGB or Grayscale",
    ),
    (
        r"can't allocate memory|out of memory|MemoryError|Cannot allocate memory",
        "this rank has no memory left",
        "type trainer.batch_size=<half>, or trainer.gradient_accumulation_steps=2",
    ),
    (r"No space left on device", "the disk is full", "free some space, or type hydra.run.dir=<another disk>"),
    (
        r"shapes cannot be multiplied|must match the size|size mismatch|expected input|invalid for input of size"
        r"|Expected .*dimension|doesn't match the broadcast shape|shape mismatch|normalized_shape",
        "the shapes of the data and of the model do not fit together",
        "change the model or the data set at the line above; python src/train.py --cfg job shows their values",
    ),
    (
        r"Expected more than 1 value per channel",
        "batch norm has one value to normalise: the last batch of an epoch, or a rank's share of it, is one sample",
        "type trainer.batch_size=<a number that leaves no single sample over>, and with several ranks of strategy=ddp "
        "or strategy=fsdp sync_bn=on",
    ),
    (
        r"view size is not compatible",
        "the model calls view on a tensor whose values lie in another order, as images do after convolutions",
        "call flatten(1) or reshape at the line above, or type trainer.channels_last=false",
    ),
    (
        r"Target \d+ is out of bounds|index out of range|device-side assert",
        "an index is larger than the table that it looks up, such as a target beyond the number of classes",
        "check the targets of the samples above, and dataset.classes",
    ),
    (
        r"Expected to have finished reduction",
        "some parameters got no gradient in a step",
        "type strategy.find_unused_parameters=true",
    ),
    (
        r"DataLoader worker.* (killed|exited)",
        "a process that loads data has ended",
        "type dataset.workers=0 to see its error here",
    ),
    (
        r"Cannot re-initialize CUDA|not compiled with CUDA|no NVIDIA driver|No CUDA GPUs",
        "the code uses a GPU, and this rank has none, or is a copy of a process that used it before",
        "take the device of the inputs at the line above; if there are GPUs, type backend=nccl launch=spawn",
    ),
    (r"CUDA error", "a GPU kernel failed, perhaps before this line", "put CUDA_LAUNCH_BLOCKING=1 before the command"),
    (
        r"FileNotFoundError|No such file",
        "a file is missing on this machine",
        "check data_dir and the paths in the config",
    ),
    (r"PermissionError", "this user may not use a file", "change its permissions, or the path in the config"),
    (
        r"LeftEarly",
        "the code at this line ends the rank before the end of the run",
        "remove that exit, or raise an exception there if the run has to fail",
    ),
    (
        r"ModuleNotFoundError|ImportError",
        "a module cannot be imported on this machine",
        "install it, or put PYTHONPATH=<its folder> before the command",
    ),
    (
        r"AttributeError|NameError|TypeError|KeyError|IndexError|ZeroDivisionError|AssertionError|NotImplementedError",
        "the code at this line has a mistake",
        "correct that line, then type the command that resumes",
    ),
)
SIGNALS: dict[str, tuple[str, str]] = {
    "SIGKILL": (
        "killed, cause not known",
        "look in the system's log (dmesg, journalctl) for what killed it, then resume",
    ),
    "SIGSEGV": ("native code crashed (segmentation fault)", "the Python stack above shows the call that crashed"),
    "SIGBUS": ("native code crashed (bus error), as when /dev/shm or a mapped file is full", "free some space there"),
    "SIGABRT": (
        "native code ended the process (abort), as gloo does when ranks give other shapes to one collective",
        "look at the collective in the stack above, and for a condition on the rank or its data",
    ),
    "SIGFPE": ("native code crashed (arithmetic error)", "the Python stack above shows the call that crashed"),
    "SIGILL": ("native code crashed (illegal instruction)", "install a build of torch for this processor"),
    "SIGTERM": ("another program asked it to end (SIGTERM)", "resume when that program allows it"),
    "SIGXCPU": ("it used up its limit of CPU time", "raise the limit (ulimit -t), then resume"),
}
CRASHES = {  # faulthandler's names
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating-point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}


def is_consequence(failure: Mapping[str, Any] | None) -> bool:
    """Whether an exception only tells that another rank is gone or silent."""
    if failure is None or failure["kind"] != "exception" or failure.get("is_local"):
        return False
    return tells_of_lost_rank(failure["message"])


def tells_of_lost_rank(message: str) -> bool:
    """Whether the message of an exception is about a rank that is gone or silent."""
    return bool(PEER_IS_GONE.search(message) or PEER_IS_SILENT.search(message))


def silent_rank(message: str) -> int | None:
    """The rank that did not answer, if the message names it."""
    if not PEER_IS_SILENT.search(message):
        return None
    found = SILENT_RANK.search(message)
    return None if found is None else int(found[1] or found[2])


def explain_exception(type_name: str, message: str, is_local: bool = False) -> tuple[str, str]:
    """(what it means, what to type) in plain words. is_local: see lockstep.failures.record."""
    for pattern, meaning, advice in MEANINGS:
        if re.search(pattern, f"{type_name}: {message}"):
            return meaning, advice
    if tells_of_lost_rank(message) and not is_local:
        return explain_lost_rank(message)
    return "the code raised this exception", "correct its cause, then type the command that resumes"


def explain_lost_rank(message: str) -> tuple[str, str]:
    """As `explain_exception`, for a message that tells of a lost rank."""
    if PEER_IS_SILENT.search(message):
        return (
            "a rank did not answer within backend.timeout: it hangs, or the network to it is down",
            "look at the other ranks' logs, or type backend.timeout=<more seconds>",
        )
    return "another rank ended before this one", "look at the other ranks' logs for its error"


def explain_exit(code: int | None, out_of_memory: bool, ended: str) -> tuple[str, str, str]:
    """(short name, what it means, what to type) of a process that ended without a word.

    out_of_memory: whether the kernel has counted a kill for want of memory. ended: what it did, a phase.
    """
    if code is None and out_of_memory:
        code = -signal.SIGKILL  # its parent, such as Slurm, has taken the exit code
    if code is None:
        meaning, advice = SIGNALS["SIGKILL"]
        return "its parent has taken the exit code", f"{meaning}; or it left by a call of exit()", advice
    if code >= 0:
        meaning = f"its program left with exit code {code} before the end of the run, in the phase {ended!r}"
        return f"exit code {code}", meaning, "remove the call of exit() in your code, or raise an exception there"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    meaning, advice = SIGNALS.get(name, (f"ended by {name}, cause not known", "resume"))
    if name == "SIGKILL" and out_of_memory:
        meaning = "the system killed it because the machine, its container or its Slurm job has no memory left"
        advice = "type trainer.batch_size=<half>, or give the job more memory (for Slurm: --mem)"
    return name, meaning, advice


def crash_in_stack(stack: Sequence[str]) -> int | None:
    """Minus the signal that faulthandler names in a stack of a process that crashed. None if it has written none.

    mpirun takes the exit code of a rank before the monitor can read it.
    """
    for line in stack:
        for words, number in CRASHES.items():
            if line == f"Fatal Python error: {words}":
                return -number
    return None


def oom_kills(counters: Sequence[Path]) -> int:
    """How often the kernel has killed for want of memory, by the first of `counters` that can be read."""
    for path in counters:
        try:
            found = re.search(r"^oom_kill (\d+)", path.read_text(), re.M)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def oom_counters(pid: int) -> list[Path]:
    """Files with the counter of the control group of a process. Under Slurm each rank may have a group of its own."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            paths += [Path("/sys/fs/cgroup", group.lstrip("/"), "memory.events"), Path("/sys/fs/cgroup/memory.events")]
        elif "memory" in controllers.split(","):
            paths.append(Path("/sys/fs/cgroup/memory", group.lstrip("/"), "memory.oom_control"))
    return paths
