"""GPUs that do not exist: CPU tensors with a device noted beside their storage, so that the CUDA paths run without one.

The kernels are the CPU's, so the numbers are real. `Tensor.device`, `.to()` and the like answer as on a GPU. `Kernels`
sees each kernel, also of backward passes and of DDP's C++: it refuses tensors of two devices, counts where the host
would wait for the device, notes nccl's collectives, and has CPU versions of kernels that only CUDA has. nccl is gloo,
which must get CUDA tensors. Apple's GPU, `mps:0`, refuses float64 and pinned memory; gloo takes none of its tensors.

Not seen: CUDA's numerics, torch.compile and CUDA graphs, races of streams, NCCL itself, memory, drivers, and what C++
thinks a tensor's device is. This is the one place where torch is replaced, in processes of their own: see `pretend`.
"""

import contextlib
import sys
import threading
from collections import Counter

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.nn.parallel as parallel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
PLAIN = (torch.Tensor, torch.nn.Parameter)
# Kernels that take no number from the CPU beside tensors of a GPU.
STRICT = ("cat", "stack", "mm", "addmm", "bmm", "convolution", "index_select", "embedding", "_fused")
WITHOUT_DETERMINISTIC = ("nll_loss2d_forward",)  # kernels that CUDA refuses with deterministic=true
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")  # their results decide about shapes
MATRIX_PRODUCTS = ("mm", "addmm", "convolution")
FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "randperm")
PURGED_AFTER = 50  # kernels: the notes of tensors that are gone are dropped

of_data = torch.tensor  # which copies from the host, and waits
real_to, real_numpy = torch.Tensor.to, torch.Tensor.numpy
notes = {}  # {address of a storage: it, where it is said to be}
of_gloo = set()  # names of groups whose tensors are on the CPU
local = threading.local()
kind = ["cuda"]  # or mps


class Seen:
    def __init__(self):
        self.waits = Counter()  # {"file.py:line": how often the host would have waited there}, while `counting`
        self.products = Counter()  # {type: matrix products in it}
        self.collectives = []  # of nccl, each as (name, (type, number of values), ...)
        self.weights_moved = 0  # bytes of parameters that came from the host to a GPU
        self.counting, self.step = False, 0  # how many steps have begun
        self.bound = None  # that nccl was started on at once

    def wait(self, *_, **__):
        ends = ("modules/_functions.py", "amp/grad_scaler.py")
        places = (each for each in callers() if "/src/lockstep/" in each[0] or each[0].endswith(ends))
        if self.counting:
            file, function = next(places, ("a thread of gloo", ""))
            self.waits[f"{file.rpartition('/')[2]}:{function}".removesuffix(":")] += 1


seen = Seen()


def callers():
    frame = sys._getframe(2)
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame.f_code.co_filename, frame.f_code.co_name


def called_by_c10d():
    """Its C++ sorts tensors by what it takes for their devices, and copies between them."""
    own = ("torch/_", "torch/utils/", __file__)
    caller = next(file for file, _ in callers() if not any(each in file for each in own))
    return caller.endswith(("nn/parallel/distributed.py", "distributed/utils.py", "distributed_c10d.py"))


# Where a tensor is.


def real_device(tensor):
    with torch._C.DisableTorchFunction():  # a mode would call what stands in its place
        return torch._C.TensorBase.device.__get__(tensor)


def plain(tensor):
    return tensor if type(tensor) in PLAIN else getattr(tensor, "_local_tensor", getattr(tensor, "elem", tensor))


def is_noted(tensor):
    return bool(real_device(tensor).type == "cpu" and tensor.layout is torch.strided)


def device_of(tensor, unknown=CPU):
    """unknown: for a tensor that C++ has made, and that no kernel has used yet."""
    tensor = plain(tensor)
    note = notes.get(tensor.untyped_storage()._cdata) if is_noted(tensor) else None
    return real_device(tensor) if note is None else note[1] or unknown


def tag(tensor, device):
    if is_noted(plain(tensor)):
        storage = plain(tensor).untyped_storage()
        notes[storage._cdata] = StorageWeakRef(storage), device
    return tensor


def full_device(device):
    found = torch.device(kind[0], device) if isinstance(device, int) else torch.device(device)
    if found.type == "mps":
        return torch.device("mps", 0)
    numberless = found.type == "cuda" and found.index is None
    return torch.device("cuda", torch.cuda.current_device()) if numberless else found


def require_known_type(tensor, device):
    if device is not None and device.type == "mps" and tensor.dtype in (torch.float64, torch.complex128):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
    return tensor


class Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, device):
        ctx.back = device_of(tensor)
        return tag(tensor.clone(), device)

    @staticmethod
    def backward(ctx, gradient):
        return tag(gradient.clone(), ctx.back), None


def to(tensor, *args, non_blocking=None, device=None, **options):
    """Tensor.to. A copy between a GPU and the host waits, but with non_blocking."""
    target, dtypes = None, [options.pop("dtype")] if options.get("dtype") else []
    for word in (*args, device):
        if isinstance(word, torch.Tensor):
            target, word = device_of(word), word.dtype
        elif isinstance(word, torch.device | str) or type(word) is int:
            target = full_device(word)
        dtypes += [word] if isinstance(word, torch.dtype) else []
    if target is not None and (target.type == "meta" or type(tensor) not in PLAIN):
        return real_to(tensor, CPU if target.type == kind[0] else target, *dtypes, **options)
    out, source = real_to(tensor, *dtypes, **options) if dtypes or options else tensor, device_of(tensor)
    if target is None or target == source:
        return out
    is_async = any(word is True for word in args) if non_blocking is None else non_blocking
    if "cpu" in (source.type, target.type) and not is_async:
        seen.wait()
    if isinstance(tensor, torch.nn.Parameter) and source.type == "cpu":
        seen.weights_moved += out.nbytes
    require_known_type(out, target)
    if out.requires_grad and torch.is_grad_enabled():
        return Move.apply(out, target)
    return tag(out.detach().clone(), target)


def to_list(tensor):
    with torch._C.DisableTorchFunction():
        on_cpu = to(tensor, CPU).detach()
        return real_numpy(on_cpu.float() if on_cpu.dtype == torch.bfloat16 else on_cpu).tolist()


def to_numpy(tensor, *args, **options):
    if device_of(tensor).type == "cuda":
        raise TypeError("can't convert cuda device type tensor to numpy. Use Tensor.cpu() first")
    with torch._C.DisableTorchFunction():
        return real_numpy(tensor, *args, **options)


def factory(make):
    def call(*args, device=None, pin_memory=False, **options):
        where = CPU if device is None else full_device(device)
        if make is of_data and where.type == "cuda":
            seen.wait()
        out = make(*args, device=CPU if where.type == kind[0] else where, **options)
        return out if "out" in options else tag(require_known_type(out, where), where)

    return call


METHODS = {
    "device": property(device_of),
    "is_cuda": property(lambda tensor: device_of(tensor).type == "cuda"),
    "is_cpu": property(lambda tensor: device_of(tensor).type == "cpu"),
    "to": to,
    "cpu": lambda tensor, *_: to(tensor, CPU),
    "numpy": to_numpy,
    "tolist": to_list,
    "pin_memory": lambda tensor, *_: tensor.clone(),
    "record_stream": lambda tensor, stream: None,
    "get_device": lambda tensor: device_of(tensor).index,
}


# What a kernel does.


class Kernels(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented  # the local tensors come next
        kwargs, (space, _, name) = dict(kwargs or {}), func._schema.name.partition("::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = [device_of(tensor, None) for tensor in tensors]
        whole = (device for tensor, device in zip(tensors, devices, strict=True) if tensor.dim() and device)
        home = next(whole, next(filter(None, devices), None))
        if space == "c10d":
            home = self.collective(name, args, tensors, devices) or home
        for tensor, device in zip(tensors, devices, strict=True):
            if device is None:
                tag(tensor, home)
        devices = [device or home for device in devices]
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        if is_deterministic and name in WITHOUT_DETERMINISTIC and home is not None and home.type == "cuda":
            raise RuntimeError(f"{name} does not have a deterministic implementation")
        if home is not None:
            self.require_one_device(name, args, kwargs, tensors, devices, home)
        if torch.device(kwargs.get("device") or "cpu").type == kind[0]:
            home, kwargs["device"] = full_device(kwargs["device"]), CPU
        before = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}
        out = ONLY_ON_CUDA.get(name, func)(*args, **kwargs)
        for leaf in tree_leaves(out) if name != "set_" else ():  # which looks at a storage that was there before
            is_tensor = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
            if is_tensor and leaf.untyped_storage()._cdata not in before:
                tag(require_known_type(leaf, home), home)
        if name in MATRIX_PRODUCTS:
            seen.products[str(tensors[0].dtype)[6:]] += 1
        Kernels.calls += 1
        if Kernels.calls % PURGED_AFTER == 0:
            for key in [key for key, (storage, _) in notes.copy().items() if storage.expired()]:
                notes.pop(key, None)
        return out

    @staticmethod
    def collective(name, args, tensors, devices):
        """Where its tensors are. RuntimeError if some are not where its backend takes them from."""
        objects = (value for value in args if isinstance(value, torch.ScriptObject))
        group = next((dist.ProcessGroup.unbox(one) for one in objects if "ProcessGroup" in str(one._type())), None)
        where = "cpu" if group is not None and group.group_name in of_gloo else "cuda"
        if name != "barrier" and {device.type for device in devices if device} - {where}:
            raise RuntimeError(f"{name}: No backend type associated with the device type of {devices}, but {where}")
        if where == "cuda":
            seen.collectives.append((name, *((str(tensor.dtype)[6:], tensor.numel()) for tensor in tensors)))
        return full_device(where)

    @staticmethod
    def require_one_device(name, args, kwargs, tensors, devices, home):
        """Count a wait of the host. Raises RuntimeError for tensors of two devices."""
        if name == "copy_":
            is_async = kwargs.get("non_blocking") or args[2:3] == (True,)
            between = {devices[0].type, devices[1].type}
            if between == {"cpu", "cuda"} and not is_async and not called_by_c10d():
                seen.wait()
        elif name in ("index", "index_put_", "_index_put_impl_") and home.type != "cpu":
            indices = list(zip(tensors, devices, strict=True))[1:]
            if any(tensor.dtype in (torch.bool, torch.uint8) or device != home for tensor, device in indices):
                seen.wait()
        elif len(set(devices)) > 1 and not name.startswith("_foreach"):
            pairs = ((tensor, device) for tensor, device in zip(tensors, devices, strict=True) if device != home)
            odd = [each for one, each in pairs if one.dim() or each.type == "cuda" or name.startswith(STRICT)]
            if odd and not called_by_c10d():
                raise RuntimeError(f"{name}: Expected all tensors to be on the same device, {home}, but found {odd[0]}")
        if name in WAITING and home.type == "cuda":
            seen.wait()


# Batch norm over several GPUs, as torch's kernels compute it.


def by_channel(vector, x):
    return vector.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(x, eps):
    wide = x.float() if x.dtype.itemsize < 4 else x
    var, mean = torch.var_mean(wide, [0, *range(2, x.dim())], unbiased=False)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(x, mean, invstd, running_mean, running_var, momentum, eps, counts):
    """As the kernel adds up one rank after the other: a first count of 0 makes NaN."""
    total = var = count = torch.zeros_like(counts[0])
    for one, inverse, values in zip(mean, invstd, counts, strict=True):
        factor = 1 / (count + values)
        var = var + (inverse**-2 - eps) * values + (total - one) ** 2 * count * values * factor
        total, count = count * factor * total + values * factor * one, count + values
    var = var / count
    if running_mean is not None:
        running_mean.lerp_(total, momentum)
        running_var.lerp_(var * count / (count - 1), momentum)
    return total, (var + eps).rsqrt()


def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    out = (x - by_channel(mean, x)) * by_channel(invstd, x)
    return (out if weight is None else out * by_channel(weight, x) + by_channel(bias, x)).type(x.dtype)


def batch_norm_backward_reduce(dy, x, mean, invstd, weight, *_):
    terms = dy, dy * (x - by_channel(mean, x))
    sum_dy, sum_dy_xmu = (term.sum([0, *range(2, x.dim())]).type(mean.dtype) for term in terms)
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()


def batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    count, scale = count.sum(), invstd if weight is None else invstd * weight
    slope = (x - by_channel(mean, x)) * by_channel(invstd**2 * sum_dy_xmu / count, x)
    return ((dy - by_channel(sum_dy / count, x) - slope) * by_channel(scale, x)).type(dy.dtype)


ONLY_ON_CUDA = {name: kernel for name, kernel in globals().items() if name.startswith("batch_norm_")}


# torch.cuda.


def do_nothing(*_, **__):
    pass


class Event:
    """To wait for one of an earlier step is no wait: the device has the newest step to work on meanwhile."""

    step = 0
    __init__ = do_nothing

    def record(self, stream=None):
        self.step = seen.step
        return self

    def synchronize(self):
        if self.step == seen.step:
            seen.wait()


class Stream(contextlib.nullcontext):
    stream_id, device_index, device_type = 0, 0, 1  # FSDP2 of torch 2.15 passes them on
    wait_stream = wait_event = do_nothing

    def __init__(self, *_, **__):
        super().__init__()

    def is_capturing(self):
        return False

    def record_event(self, event=None):
        return (event or Event()).record()


class Device(contextlib.nullcontext):
    def __init__(self, index):
        super().__init__()
        self.idx = index


def synchronize(device=None):
    if device is not None and torch.device(device).type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    seen.wait()


def grouped(lists, with_indices=False):
    """Of optimizers, which ask C++, and that sees the CPU."""
    found = {}
    for number, tensor in enumerate(lists[0]):
        of_kind, numbers = found.setdefault((device_of(tensor), tensor.dtype), ([[] for _ in lists], []))
        numbers.append(number)
        for one, some in zip(of_kind, lists, strict=True):
            if some:
                one.append(some[number])
    return found


def with_kernels(run):
    """For other threads: gloo's callbacks, which nccl runs at once, and those of data_parallel."""

    def call(*args):
        with Kernels():
            return run(*args)

    return call


def gather(tensors, dim, index):
    with torch.autocast("cpu", enabled=False):
        return torch.cat([to(tensor, full_device(index or 0), non_blocking=True) for tensor in tensors], dim or 0)


def broadcast_to(tensors, numbers, _):
    return [[tag(tensor.detach().clone(), full_device(number)) for tensor in tensors] for number in numbers]


def sums_on(rows, number, *_):
    columns = zip(*rows, strict=True)
    return tuple(sum(to(tensor, full_device(number), non_blocking=True) for tensor in column) for column in columns)


def no_pinned_memory(*_):
    raise RuntimeError("Cannot pin memory: there is no CUDA")


def pretend(gpus, backend_name, of="cuda"):
    """From here on this process has `gpus` GPUs. backend_name: of its world. of: cuda, or mps for Apple's one."""
    current, kind[0] = [0], of
    begin_autocast, start, new_group = torch.autocast.__init__, dist.init_process_group, dist.new_group
    wrap, then, future = torch.Tensor._make_wrapper_subclass, torch._C.Future.then, torch.futures.Future.__init__
    as_tensor, is_autocast_enabled, backward = torch.as_tensor, torch.is_autocast_enabled, torch.autograd.backward
    autocast_dtype, make_generator = torch.get_autocast_dtype, torch.Generator

    def autocast(self, device_type, dtype=None, *args, **options):
        if device_type == kind[0]:  # its type is float16 at the beginning of each thread
            device_type = "cpu"
            dtype = local.dtype = dtype or getattr(local, "dtype", torch.float16)
        begin_autocast(self, device_type, dtype, *args, **options)

    def init_process_group(name, device_id=None, **options):
        start("gloo", **options)
        seen.bound = device_id
        if name == "gloo":
            of_gloo.add(dist.group.WORLD.group_name)

    def pretended_group(*args, backend=None, **options):
        group = new_group(*args, backend="gloo", **options)
        if backend == "gloo":
            of_gloo.add(group.group_name)
        return group

    def backward_from(tensors, grad_tensors=None, *args, **options):
        """The gradient of an edge is made where C++ takes the tensor for: it is that of a loss."""
        if isinstance(tensors, torch.autograd.graph.GradientEdge) and grad_tensors is None:
            dtype = tensors.node._input_metadata[tensors.output_nr].dtype
            where = CPU if backend_name == "gloo" and of == "cuda" else torch.device(of, current[0])
            grad_tensors = torch.ones((), dtype=dtype, device=where)
        backward(tensors, grad_tensors, *args, **options)

    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: gpus,
        "is_initialized": lambda: True,
        "current_device": lambda: current[0],
        "set_device": lambda device: current.__setitem__(0, full_device(device).index),
        "Event": Event,
        "Stream": Stream,
        "device": Device,
        "stream": contextlib.nullcontext,
        "current_stream": Stream,
        "synchronize": synchronize,
        "get_device_name": lambda device=None: "none",
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device=None: (9, 0),
        "default_generators": tuple(torch.Generator() for _ in range(gpus)),
    }
    accelerator = {"is_available": lambda: True, "current_stream": Stream, "device_index": Device}
    accelerator["current_accelerator"] = lambda *_, **__: torch.device("cuda")
    of_torch = {name: factory(getattr(torch, name)) for name in FACTORIES}
    of_torch["as_tensor"] = lambda *args, device=None, **options: to(as_tensor(*args, **options), device or CPU)
    of_torch["get_autocast_dtype"] = lambda *_: autocast_dtype("cpu")
    of_torch["is_autocast_enabled"] = lambda *_: is_autocast_enabled("cpu")
    of_tensor = METHODS | {"_make_wrapper_subclass": lambda *args, **options: wrap(*args, **options | {"device": CPU})}
    of_c = {"_group_tensors_by_device_and_dtype": grouped, "_gather": gather, "_broadcast_coalesced": broadcast_to}
    changes = [
        (torch.cuda, cuda),
        (torch.accelerator, accelerator),
        (torch, of_torch),
        (torch.Tensor, of_tensor),
        (torch._C, of_c),
        (torch.autocast, {"__init__": autocast}),
        (torch.autograd, {"backward": backward_from}),
        (dist, {"init_process_group": init_process_group, "new_group": pretended_group}),
        (dist.distributed_c10d, {"new_group": pretended_group}),
        (device_mesh, {"get_backend": lambda *_: "nccl"}),
        (torch.futures.Future, {"__init__": lambda self, *, devices=None: future(self)}),
        (torch._C.Future, {"then": lambda self, callback: then(self, with_kernels(callback))}),
        (threading.Thread, {"run": with_kernels(threading.Thread.run)}),
        (parallel._functions.comm, {"reduce_add_coalesced": sums_on}),
        (sys.modules["torch.nn.parallel.data_parallel"], {"_check_balance": lambda ids: None}),
    ]
    if of == "mps":
        of_torch["Generator"] = lambda device=None: make_generator()
        of_tensor["pin_memory"] = no_pinned_memory
        changes = [change for change in changes if change[0] not in (torch.cuda, torch.accelerator)]
        changes += [(torch.backends.mps, {"is_available": lambda: True}), (torch.mps, {"manual_seed": do_nothing})]
    for place, values in changes:
        for name, value in values.items():
            setattr(place, name, value)
    Kernels().__enter__()
