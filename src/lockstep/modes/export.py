"""mode=export: a trained net as a file for other programs."""

import importlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import ConfigError
from lockstep.failures.record import exception_record
from lockstep.modes.base import Mode, TrainedRun, require_place, write_output
from lockstep.text import first_line

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

Exported = tuple[bytes, Callable[["Tensor"], Any]]
"""What a file holds, and what it computes of raw samples (N, ...): a tensor, or a tuple, list or dict of such."""

Format = Literal["torch_export", "onnx", "safetensors", "state_dict"]


class Export(Mode):
    """torch_export and onnx hold the net with its preprocessing: raw samples (N, ...) in, for any N; outputs out.

    Both compute in the type of the weights, without autocast, and what they compute is compared with the net before
    the file is written. safetensors and state_dict hold the weights alone.

    format: what the file is.
    file: where the net goes; null: last.pt2, best.onnx, ... in the run.
    """

    name, reads_training_data = "export", False

    def __init__(self, snapshot: str, format: Format, file: str | None) -> None:
        self.snapshot, self.format, self.file = snapshot, format, file

    def validate(self, job: "JobSpec") -> None:
        require_place(self.file)
        if missing := [name for name in NEEDS.get(self.format, ()) if importlib.util.find_spec(name) is None]:
            what = f"mode.format={self.format} needs {' and '.join(missing)}"
            raise ConfigError(f"{what}; type pip install {' '.join(missing)}")
        if job.world_size > 1:
            raise ConfigError(f"mode=export is the work of one process, not of {job.world_size}; type launch=env")

    def work(self, config: "RunConfig", record: "ConfigRecord", parts: "Parts") -> None:
        # On the CPU: a program keeps the device that it was traced on.
        super().work(config.changed({"backend.name": "gloo"}), record, parts)

    def run(self, trained: TrainedRun) -> None:
        """Raises ConfigError if the file cannot be written, or would compute something else."""
        stem = self.snapshot if self.snapshot in ("last", "best") else trained.snapshot.stem
        path = Path(self.file) if self.file is not None else trained.folder / f"{stem}.{SUFFIXES[self.format]}"
        with trained.run.averaged_weights():
            contents = self._contents(trained)
        log.info("exported: the weights of step %d, as %s", trained.step, self.format)
        write_output(trained.world, path, contents)

    def _contents(self, trained: TrainedRun) -> bytes:
        import torch

        from lockstep.data.reader import request_of
        from lockstep.modes.trained_net import TrainedNet
        from lockstep.snapshots.state import as_saved, map_tensors

        model, loader = trained.run.model.eval(), trained.run.loaders.test
        if self.format in ("state_dict", "safetensors"):
            state = dict(model.state_dict())
            return weights_as(map_tensors(lambda _, tensor: as_saved(tensor), state), self.format)
        samples, _ = loader.reader.read(request_of(range(min(EXAMPLES, len(loader.reader)))))
        if not isinstance(samples, torch.Tensor):
            raise ConfigError(f"mode.format={self.format} needs samples of one tensor; type mode.format=state_dict")
        if len(samples) == 1:  # torch.export would take a batch of one for the only size
            samples = torch.cat([samples, samples])
        return net_as(TrainedNet(model, loader.converter, "fp32", trained.classes), samples, self.format)


def weights_as(weights: dict[str, Any], format: str) -> bytes:
    """weights: a state dict, which may hold more than tensors. format: state_dict or safetensors."""
    import torch

    if format == "state_dict":
        file = io.BytesIO()
        torch.save(weights, file)
        return file.getvalue()
    from safetensors.torch import save

    tensors = {name: value.clone() for name, value in weights.items() if isinstance(value, torch.Tensor)}
    if others := weights.keys() - tensors.keys():
        log.warning("not written: %s; safetensors holds only tensors, and state_dict all", ", ".join(others))
    return save(tensors)  # tied weights are written twice


def net_as(net: "TrainedNet", samples: "Tensor", format: str) -> bytes:
    """The net with its preprocessing, as torch_export or onnx.

    Raises ConfigError for a net that the format cannot hold, and for one that computes something else.

    samples: raw ones, two or more: to torch.export a batch of one is the only size.
    """
    import torch

    shapes: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
    if samples.dim() == 2 and not samples.is_floating_point() and samples.shape[1] > 1:  # tokens: or fewer
        shapes[1] = torch.export.Dim.AUTO(min=1, max=samples.shape[1])
    with torch.no_grad():
        contents, outputs_of = (onnx if format == "onnx" else program)(net, samples, {"samples": shapes})
        for batch in (samples, samples[:1]):
            require_same_outputs(net(batch), outputs_of(batch), format)
    return contents


def program(net: "TrainedNet", samples: "Tensor", shapes: Any) -> Exported:
    """torch.export. `torch.export.load(path).module()` is the net."""
    import torch

    try:
        with redirect_stderr(io.StringIO()):  # torch prints the whole graph of a net that it cannot export
            exported = torch.export.export(net, (samples,), dynamic_shapes=shapes)
    except Exception as error:  # what it raises has no common type
        failed = exception_record(error)
        place = f", at {failed['file']}:{failed['line']}" if "file" in failed else ""
        advice = "mode.format=state_dict, or write x.shape[0] for len(x), and torch.where for if, in the model"
        raise ConfigError(f"torch cannot export this net ({first_line(error)}{place}); type {advice}") from error
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No complete tensor found")  # where the storage of a weight has spare room
        torch.export.save(exported, file)
    return file.getvalue(), torch.export.load(file).module()


def onnx(net: "TrainedNet", samples: "Tensor", shapes: Any) -> Exported:
    """ONNX with the input "samples" and the output "outputs"."""
    import torch

    if any(parameter.dtype in (torch.float64, torch.bfloat16) for parameter in net.parameters()):
        raise ConfigError("mode.format=onnx is for float32 weights; type trainer.precision=fp32 mode.format=onnx")
    for name in ("onnxscript", "onnx_ir"):  # they log each of their passes
        logging.getLogger(name).setLevel(logging.WARNING)
    names: dict[str, Any] = {"input_names": ["samples"], "output_names": ["outputs"], "dynamic_shapes": shapes}
    exported: Any = torch.onnx.export(net, (samples,), dynamo=True, verbose=False, **names)
    contents = exported.model_proto.SerializeToString()
    session = importlib.import_module("onnxruntime").InferenceSession(contents, providers=["CPUExecutionProvider"])
    return contents, lambda batch: [*map(torch.from_numpy, session.run(None, {"samples": batch.cpu().numpy()}))]


def require_same_outputs(ours: Any, theirs: Any, format: str) -> None:
    """Raise ConfigError if an exported net computes something else than the net. The data may hold NaN."""
    import torch

    from lockstep.data.source import tensors_in

    ours, theirs = [*tensors_in(ours)], [*tensors_in(theirs)]
    largest = max([1.0, *(float(one.nan_to_num(0, 0, 0).abs().max()) for one in ours if one.numel())])
    near: dict[str, Any] = {"rtol": 0, "atol": TOLERANCE * largest, "equal_nan": True}
    try:
        torch.testing.assert_close(theirs, ours, **near, check_dtype=False, check_device=False)
    except AssertionError as error:
        what = f"mode.format={format}: the exported net gives other outputs ({' '.join(str(error).split())})"
        raise ConfigError(f"{what}; type mode.format=state_dict") from None
