"""mode=export: a trained net as a file for other programs."""

import importlib
import io
import logging
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.data.reader import request_of
from lockstep.data.source import tensors_in
from lockstep.errors import ConfigError, first_line
from lockstep.modes.base import Mode, TrainedRun
from lockstep.modes.trained_net import TrainedNet

log = logging.getLogger(__name__)

SUFFIXES = {"torch_export": "pt2", "onnx": "onnx"}
WEIGHTS = "its weights are in model.pt, and lockstep.load gives the net"
EXAMPLES = 5  # samples of the batch by which outputs are compared
TOLERANCE = 1e-4  # of outputs that another program computes in float32, relative to the largest one


class Export(Mode):
    """The net with its preprocessing: raw samples (N, ...) in, for any N; outputs out.

    It computes in the type of the weights, without autocast, and what it computes is compared with the net before the
    file is written.

    format: what the file is.
    module: the part of the net that is exported, which takes the net's inputs; null: all of it.
    file: where the net goes; null: last.pt2, best.onnx, ... in the run.
    """

    name, reads_training_data, in_one_process = "export", False, True

    def __init__(
        self, snapshot: str, format: Literal["torch_export", "onnx"], module: str | None, file: str | None
    ) -> None:
        self.snapshot, self.format, self.module, self.file = snapshot, format, module, file

    def run(self, trained: TrainedRun) -> None:
        """Raises ConfigError if the file cannot be written, or would compute something else."""
        stem = self.snapshot if self.snapshot in ("last", "best") else trained.snapshot.stem
        path, loader = trained.output(self.file, f"{stem}.{SUFFIXES[self.format]}"), trained.run.loaders.test
        samples, _ = loader.reader.read(request_of(range(min(EXAMPLES, len(loader.reader)))))
        with trained.run.averaged_weights():
            part = trained.run.model.eval().get_submodule(self.module or "")
            try:  # on the CPU: a program keeps the device that it was traced on
                contents = net_as(TrainedNet(part, loader.converter, "fp32").cpu(), samples, self.format)
            except Exception as error:  # what torch raises has no common type
                raise ConfigError(f"this net cannot be exported ({first_line(error)}); {WEIGHTS}") from error
        log.info("exported: the weights of step %d, as %s", trained.step, self.format)
        trained.write(path, contents)


def net_as(net: TrainedNet, samples: Tensor, format: str) -> bytes:
    """The net with its preprocessing, as torch_export, whose `torch.export.load(path).module()` is the net, or as onnx,
    with the input "samples" and the output "outputs". samples: raw ones. Raises what torch raises of a net that it
    cannot export, and AssertionError for one that computes something else."""
    if len(samples) == 1:  # torch.export would take a batch of one for the only size
        samples = torch.cat([samples, samples])
    shapes: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
    if samples.dim() == 2 and not samples.is_floating_point() and samples.shape[1] > 1:  # tokens: or fewer
        shapes[1] = torch.export.Dim.AUTO(min=1, max=samples.shape[1])
    options: dict[str, Any] = {"dynamic_shapes": {"samples": shapes}}
    file, is_onnx = io.BytesIO(), format == "onnx"
    with torch.no_grad():
        if is_onnx:
            for name in ("onnxscript", "onnx_ir"):  # they log each of their passes
                logging.getLogger(name).setLevel(logging.WARNING)
            options |= {"input_names": ["samples"], "output_names": ["outputs"], "dynamo": True, "verbose": False}
            exported: Any = torch.onnx.export(net, (samples,), **options)
            file.write(exported.model_proto.SerializeToString())
            runtime = importlib.import_module("onnxruntime")
            session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
        else:
            torch.export.save(torch.export.export(net, (samples,), **options), file)
            module: Any = torch.export.load(file).module()
        for batch in (samples, samples[:1]):
            theirs = session.run(None, {"samples": batch.numpy()}) if is_onnx else module(batch)
            require_same_outputs(net(batch), [*map(torch.from_numpy, theirs)] if is_onnx else theirs, format)
    return file.getvalue()


def require_same_outputs(ours: Any, theirs: Any, format: str) -> None:
    """Raise AssertionError if an exported net computes something else than the net. The data may hold NaN."""
    ours, theirs = [*tensors_in(ours)], [*tensors_in(theirs)]
    largest = max([1.0, *(float(one.nan_to_num(0, 0, 0).abs().max()) for one in ours if one.numel())])
    near: dict[str, Any] = {"rtol": 0, "atol": TOLERANCE * largest, "equal_nan": True, "check_dtype": False}
    what = f"mode.format={format}: the exported net gives other outputs; "
    torch.testing.assert_close(theirs, ours, **near, msg=lambda said: what + said)
