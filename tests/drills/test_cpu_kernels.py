"""torch's convolutions on a CPU: the layout that a model gets here gives right gradients and damages no memory.

The backward pass runs many times with glibc's checks of the heap, also as on a CPU without AVX-512. It is compared with
float64 in the other layout.
"""

import os
import random
import subprocess
import sys

import pytest
import torch
from torch import nn

from lockstep.training.setup import model_memory_format
from support.commands import ROOT

COUNT, LIMITS = 150, {False: 1e-4, True: 0.1}  # of errors in float32 and in bfloat16
CHOICES = {
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


def case(number, kernels):
    draw = random.Random(f"{number} {kernels}")
    found = {name: draw.choice(values) for name, values in (CHOICES | {"kernel_size": kernels}).items()}
    return found | {name: found["groups"] * found[name] for name in ("in_channels", "out_channels")}


def largest_error(size, samples, bf16, **options):
    """Of the gradients of weights and inputs, relative to their largest value, as a part of the limit."""
    torch.manual_seed(0)
    net, reference = nn.Conv2d(**options), nn.Conv2d(**options).double()
    reference.load_state_dict(net.state_dict())
    layout = model_memory_format(net, "auto", torch.device("cpu"))
    net.to(memory_format=layout)
    inputs = torch.randn(samples, options["in_channels"], size, size)
    right = inputs.double().requires_grad_()
    reference(right).pow(2).sum().backward()
    inputs, worst = inputs.to(memory_format=layout).requires_grad_(), 0.0
    for _ in range(10):
        net.zero_grad()
        inputs.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            outputs = net(inputs)
        outputs.float().pow(2).sum().backward()
        for ours, expected in ((net.weight.grad, reference.weight.grad), (inputs.grad, right.grad)):
            worst = max(worst, float((ours - expected).abs().max() / (expected.abs().max() + 1e-12)) / LIMITS[bf16])
    return worst


@pytest.mark.drill
@pytest.mark.parametrize("isa", ["AVX2", "DEFAULT"])
@pytest.mark.parametrize("kernels", ["1", "1235"])
def test_gradients_of_convolutions_are_right_and_the_heap_is_whole(isa, kernels):
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "MALLOC_CHECK_": "3", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT / 'tests'}"
    done = subprocess.run([sys.executable, __file__, kernels], text=True, capture_output=True, env=env, timeout=200)
    errors = [float(line) for line in done.stdout.split()]
    assert done.returncode == 0, (case(len(errors), [*map(int, kernels)]), done.stderr[-500:])
    assert len(errors) == COUNT
    assert not [(case(number, [*map(int, kernels)]), error) for number, error in enumerate(errors) if not error < 1]


if __name__ == "__main__":
    for number in range(COUNT):
        print(largest_error(**case(number, [*map(int, sys.argv[1])])), flush=True)
