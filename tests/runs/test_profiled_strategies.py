"""profiler.enabled=true in worlds of several ranks, with every strategy that has steps to measure."""

import statistics

import pytest

from support.commands import own_data
from support.configs import composed
from support.profiles import OFTEN, PHASES, check_profile, measured_steps
from support.worlds import in_world, same_bits, train, train_all

SMALL = ["model=mlp", "trainer.batch_size=240", "trainer.epochs=4"]


def test_two_profiled_ranks_end_with_the_bits_of_unprofiled_ones(tmp_path):
    on = composed(f"run_dir={tmp_path / 'on'}", *SMALL, *OFTEN)
    off = composed(f"run_dir={tmp_path / 'off'}", *SMALL)
    for profiled, plain in in_world(2, train_all, [on, off]):
        assert profiled == plain
    assert same_bits(tmp_path / "on", tmp_path / "off")
    check_profile(tmp_path / "on", ranks=2)


def test_the_phase_that_takes_long_is_shown_to_take_long(tmp_path):
    slow = [
        *own_data("support.slow.SlowDigits"),
        "model._target_=support.slow.SlowModel",
        "optimizer._target_=support.slow.SlowSGD",
    ]
    in_world(2, train, composed(f"run_dir={tmp_path}", *SMALL, "trainer.batch_size=16", *OFTEN, *slow))
    steps = check_profile(tmp_path, ranks=2)
    median = {phase: statistics.median(step[phase] for step in steps) for phase in PHASES}
    assert median["data"] >= 8  # samples of 1 ms on each rank
    assert median["forward"] >= 15
    assert median["backward"] >= 10
    assert median["gradient_sync"] >= 40  # rank 0 waits for rank 1
    assert median["optimizer"] >= 20


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (
            2,
            [
                "trainer.gradient_accumulation_steps=3",
                "trainer.max_grad_norm=1.0",
                "trainer.ema=0.9",
                "gradient_sync=ring",
            ],
        ),
        (2, ["strategy=fsdp", "trainer.gradient_accumulation_steps=2"]),
        (2, ["strategy=virtual_ranks"]),
        (2, ["strategy=model_parallel"]),
        (1, ["strategy=data_parallel", "trainer.precision=bf16"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_phase_is_measured_with(tmp_path, ranks, options):
    in_world(ranks, train, composed(f"run_dir={tmp_path}", *SMALL, *OFTEN, *options))
    steps = measured_steps(tmp_path)
    assert steps
    for step in steps:
        assert all(step[phase] > 0 for phase in PHASES)
        assert sum(step[phase] for phase in PHASES) == pytest.approx(step["step"], rel=1e-5)


def count_graphs(cfg):
    import torch

    train(cfg)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_compiled_model_is_not_compiled_again_to_be_measured(tmp_path):
    compiled = ["model=mlp", "model._target_=support.slow.compiled_mlp", "trainer.max_steps=20"]
    counts = []
    for name, options in (("off", []), ("on", OFTEN)):
        cfg = composed(f"run_dir={tmp_path / name}", *compiled, *options)
        counts.append(in_world(1, count_graphs, cfg))
    assert counts[0] == counts[1] > [0]
    assert measured_steps(tmp_path / "on")
