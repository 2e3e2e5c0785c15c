"""torch's convolutions on a CPU: the layout that a model gets here gives right gradients and damages no memory.

The backward pass runs many times with glibc's checks of the heap, also as on a CPU without AVX-512. It is compared with
float64 in the other layout.
"""

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.training.setup import model_memory_format
from support.commands import ROOT

CPU = torch.device("cpu")
BITS, TYPES = {torch.float32: 1e-4, torch.bfloat16: 0.1}, (torch.float32, torch.bfloat16)


CHOICES: dict[str, list[Any]] = {
    "groups": [1, 1, 1, 2, 4],
    "in_channels": [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 32],  # of a group, as out_channels
    "out_channels": [1, 3, 8, 16, 20],
    "stride": [1, 2, 2, 3, 4],
    "padding": [0, 0, 1],
    "bias": [True, False],
    "size": [5, 8, 16, 17],
    "samples": [1, 2, 16],
    "bf16": [True, False, False, False, False],
}


def cases(seed: int, count: int, kernels: list[int]) -> list[dict[str, Any]]:
    draw, choices = random.Random(seed), CHOICES | {"kernel_size": kernels}
    found = [{name: draw.choice(values) for name, values in choices.items()} for _ in range(count)]
    of_all = [{name: case["groups"] * case[name] for name in ("in_channels", "out_channels")} for case in found]
    return [case | channels for case, channels in zip(found, of_all, strict=True)]


def largest_error(case: dict[str, Any]) -> float:
    """Of the gradients of weights and inputs, relative to their largest value."""
    size, samples, precision = case.pop("size"), case.pop("samples"), TYPES[case.pop("bf16")]
    torch.manual_seed(0)
    net = nn.Conv2d(**case)
    reference = nn.Conv2d(**case).double()
    reference.load_state_dict(net.state_dict())
    layout = model_memory_format(net, "auto", CPU)
    net.to(memory_format=layout)
    inputs = torch.randn(samples, case["in_channels"], size, size)
    right = inputs.double().requires_grad_()
    reference(right).pow(2).sum().backward()
    inputs = inputs.to(memory_format=layout).requires_grad_()
    worst = 0.0
    for _ in range(10):
        net.zero_grad()
        inputs.grad = None
        with torch.autocast("cpu", precision, enabled=precision == torch.bfloat16):
            outputs = net(inputs)
        outputs.float().pow(2).sum().backward()
        pairs: Any = ((net.weight.grad, reference.weight.grad), (inputs.grad, right.grad))
        for ours, expected in pairs:
            scale = expected.abs().max() + 1e-12
            worst = max(worst, float((ours - expected).abs().max() / scale) / BITS[precision])
    return worst


@pytest.mark.drill
@pytest.mark.parametrize("isa", ["AVX2", "DEFAULT"])
@pytest.mark.parametrize("kernels", [[1], [1, 2, 3, 5]], ids=["1x1", "all"])
def test_gradients_of_convolutions_are_right_and_the_heap_is_whole(isa: str, kernels: list[int]) -> None:
    lines = "\n".join(json.dumps(case) for case in cases(7, 150, kernels))
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "MALLOC_CHECK_": "3", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT / 'tests'}"
    done = subprocess.run([sys.executable, __file__], input=lines, text=True, capture_output=True, env=env, timeout=200)
    errors = [float(line) for line in done.stdout.split()]
    assert done.returncode == 0, (lines.splitlines()[len(errors)], done.stderr[-500:])
    assert len(errors) == 150
    wrong = [(case, error) for case, error in zip(lines.splitlines(), errors, strict=True) if not error < 1]
    assert not wrong


if __name__ == "__main__":
    for line in sys.stdin:
        print(largest_error(json.loads(line)), flush=True)
