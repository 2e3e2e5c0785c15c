"""mode=export: a trained net as a file for other programs."""

import importlib
import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import ConfigError, printable
from lockstep.failures.record import exception_record
from lockstep.modes.base import Mode, TrainedRun, cannot_write, require_place

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.config.record import ConfigRecord
    from lockstep.config.schema import RunConfig
    from lockstep.modes.trained_net import TrainedNet
    from lockstep.preflight import Parts
    from lockstep.strategies.base import JobSpec

log = logging.getLogger(__name__)

NEEDS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "safetensors": ("safetensors",)}
SUFFIXES = {"torch_export": "pt2", "onnx": "onnx", "safetensors": "safetensors", "state_dict": "pt"}
EXAMPLES = 5  # samples of the batch by which outputs are compared
TOLERANCE = 1e-4  # of outputs that another program computes in float32, relative to the largest one

Weights = dict[str, Any]
"""A model's state dict: tensors, and what modules give in get_extra_state."""

Outputs = Callable[["Tensor"], Any]
"""What an exported file computes of raw samples (N, ...): a tensor, or a tuple, list or dict of such."""


Format = Literal["torch_export", "onnx", "safetensors", "state_dict"]


class Export(Mode):
    """torch_export and onnx hold the net with its preprocessing: raw samples (N, ...) in, for any N; outputs out.

    Both compute in the type of the weights, without autocast, and the file is compared with the net before it gets its
    name. safetensors and state_dict hold the weights alone.

    format: what the file is.
    file: where the net goes; null: last.pt2, best.onnx, ... in the run.
    """

    name, reads_training_data = "export", False

    def __init__(self, snapshot: str, format: Format, file: str | None) -> None:
        self.snapshot, self.format, self.file = snapshot, format, file

    def validate(self, job: "JobSpec") -> None:
        require_place(self.file)
        if self.format == "torch_export" and self.file is not None and Path(self.file).suffix != ".pt2":
            raise ConfigError(f"torch.export.load reads files that end in .pt2; type mode.file={self.file}.pt2")
        missing = [name for name in NEEDS.get(self.format, ()) if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"mode.format={self.format} needs {' and '.join(missing)}; type pip install {' '.join(missing)}"
            )
        if job.world_size > 1:
            raise ConfigError(f"mode=export is the work of one process, not of {job.world_size}; type launch=env")

    def work(self, config: "RunConfig", record: "ConfigRecord", parts: "Parts") -> None:
        # On the CPU: a program keeps the device that it was traced on.
        super().work(config.changed({"backend.name": "gloo"}), record, parts)

    def run(self, trained: TrainedRun) -> None:
        """Raises ConfigError if the file cannot be written, or computes something else."""
        stem = self.snapshot if self.snapshot in ("last", "best") else trained.snapshot.stem
        path = Path(self.file) if self.file is not None else trained.folder / f"{stem}.{SUFFIXES[self.format]}"
        # The suffix stays: torch.export asks for it.
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp{path.suffix}")
        try:
            with trained.run.averaged_weights():
                self._write(trained, temporary)
            os.replace(temporary, path)
        except Exception as error:
            # On a full disk torch.save raises an error that does not say so.
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            raise cannot_write(path, cause) from error
        finally:
            temporary.unlink(missing_ok=True)
        log.info("exported: the weights of step %d, as %s", trained.step, self.format)
        log.info("written to: %s", path)

    def _write(self, trained: TrainedRun, path: Path) -> None:
        import torch

        from lockstep.modes.trained_net import TrainedNet
        from lockstep.snapshots.state import as_saved, map_tensors

        model = trained.run.model.eval()
        if self.format in ("state_dict", "safetensors"):
            state = dict(model.state_dict())
            write_weights(map_tensors(lambda _, tensor: as_saved(tensor), state), path, self.format)
            return
        net = TrainedNet(model, trained.run.loaders.test.converter, "fp32", trained.classes)
        loader = trained.run.loaders.test
        samples, _ = loader.raw(torch.arange(min(EXAMPLES, len(loader.reader))))
        if not isinstance(samples, torch.Tensor):
            raise ConfigError(f"mode.format={self.format} needs samples of one tensor; type mode.format=state_dict")
        if len(samples) == 1:  # torch.export would take a batch of one for the only size
            samples = torch.cat([samples, samples])
        with torch.no_grad():
            write_net(net, samples, path, self.format)


def write_net(net: "TrainedNet", samples: "Tensor", path: Path, format: str) -> None:
    """Write the net with its preprocessing as `format` says, torch_export or onnx, and compare it with the net.

    Raises ConfigError for a net that the format cannot hold, and for a file that computes something else.

    samples: raw ones, two or more: to torch.export a batch of one is the only size.
    """
    exported = write_onnx(net, samples, path) if format == "onnx" else write_program(net, samples, path)
    batches = [samples, samples[:1]]
    if is_tokens(samples):
        batches.append(samples[:, : samples.shape[1] // 2])
    for batch in batches:
        try:
            outputs = exported(batch)
        except Exception:  # torch and onnxruntime have errors of their own for another size
            if batch.shape[1:] == samples.shape[1:]:
                raise
            log.warning("the file takes samples of %d tokens, and no fewer", samples.shape[1])
        else:
            require_same_outputs(net(batch), outputs, format)


def write_weights(weights: Weights, path: Path, format: str) -> None:
    """Write the weights as `format` says, state_dict or safetensors."""
    import torch

    if format == "state_dict":
        with open(path, "wb") as file:
            torch.save(weights, file)
        return
    from safetensors.torch import save

    others = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if others:
        log.warning("not written: %s; safetensors holds only tensors, and state_dict all", ", ".join(others))
        weights = {name: value for name, value in weights.items() if name not in others}
    # Tied weights are written twice. Its save_file would make a file that only its owner can read.
    path.write_bytes(save({name: value.clone() for name, value in weights.items()}))


def is_tokens(samples: "Tensor") -> bool:
    """Whether samples are token numbers (N, T), of which there may be fewer in another batch."""
    return samples.dim() == 2 and not samples.is_floating_point() and samples.shape[1] > 1


def dynamic_shapes(samples: "Tensor") -> dict[str, dict[int, Any]]:
    """Any number of samples; of tokens any number up to that of these, where the net can."""
    import torch

    sizes: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
    if is_tokens(samples):
        sizes[1] = torch.export.Dim.AUTO(min=1, max=samples.shape[1])
    return {"samples": sizes}


def write_program(net: "TrainedNet", samples: "Tensor", path: Path) -> Outputs:
    """torch.export. `torch.export.load(path).module()` is the net."""
    import torch

    try:
        with redirect_stderr(io.StringIO()):  # torch prints the whole graph of a net that it cannot export
            program = torch.export.export(net, (samples,), dynamic_shapes=dynamic_shapes(samples))
    except Exception as error:  # what it raises has no common type
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        failed = exception_record(error)
        place = f", at {failed['file']}:{failed['line']}" if "file" in failed else ""
        raise ConfigError(
            f"torch cannot export this net ({printable(first).strip()}{place}); type mode.format=state_dict, or write "
            f"x.shape[0] for len(x), and torch.where for if, in the model"
        ) from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No complete tensor found")  # where the storage of a weight has spare room
        with open(path, "wb") as file:
            torch.export.save(program, file)
    return torch.export.load(path).module()


def write_onnx(net: "TrainedNet", samples: "Tensor", path: Path) -> Outputs:
    """ONNX with the input "samples" and the output "outputs"."""
    import torch

    if any(parameter.dtype in (torch.float64, torch.bfloat16) for parameter in net.parameters()):
        raise ConfigError("mode.format=onnx is for float32 weights; type trainer.precision=fp32 mode.format=onnx")
    for name in ("onnxscript", "onnx_ir"):  # they log each of their passes
        logging.getLogger(name).setLevel(logging.WARNING)
    onnxruntime: Any = importlib.import_module("onnxruntime")
    names: dict[str, Any] = {"input_names": ["samples"], "output_names": ["outputs"]}
    names["dynamic_shapes"] = dynamic_shapes(samples)
    torch.onnx.export(net, (samples,), path, dynamo=True, external_data=False, verbose=False, **names)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda batch: [torch.from_numpy(value) for value in session.run(None, {"samples": batch.cpu().numpy()})]


def require_same_outputs(ours: Any, theirs: Any, format: str) -> None:
    """Raise ConfigError if an exported net computes something else than the net. The data may hold NaN."""
    from lockstep.data.source import tensors_in

    for one, other in zip_longest(tensors_in(ours), tensors_in(theirs)):
        problem = "another number of tensors" if one is None or other is None else _difference(one, other)
        if problem:
            raise ConfigError(f"mode.format={format}: the exported net gives {problem}; type mode.format=state_dict")


def _difference(ours: "Tensor", theirs: "Tensor") -> str:
    """How an exported net's outputs differ; empty if they do not."""
    import torch

    if ours.shape != theirs.shape:
        return f"the shape {list(theirs.shape)} instead of {list(ours.shape)}"
    ours, theirs = ours.cpu(), theirs.cpu().to(ours.dtype)
    largest = float(ours.nan_to_num(0.0, 0.0, 0.0).abs().max()) if ours.numel() else 0.0
    same = torch.isclose(theirs, ours, rtol=0.0, atol=TOLERANCE * max(1.0, largest), equal_nan=True)
    return "" if same.all() else f"values that differ by {float((ours - theirs)[~same].abs().max()):.2g}"
