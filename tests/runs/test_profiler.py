"""profiler.enabled=true: a run shows the phases of its steps, and trains to the same bits."""

import pytest

from lockstep.errors import ConfigError
from lockstep.preflight import preflight
from support.configs import composed
from support.event_files import scalars
from support.profiles import OFTEN, check_profile
from support.worlds import in_world, same_bits, train_all

SMALL = ["model=mlp", "trainer.batch_size=240", "trainer.epochs=4"]  # 5 whole batches an epoch, and a smaller one


def test_a_profiled_run_shows_its_phases_and_ends_with_the_same_bits(tmp_path):
    on = composed(f"run_dir={tmp_path / 'on'}", *SMALL, *OFTEN)
    off = composed(f"run_dir={tmp_path / 'off'}", *SMALL)
    ((profiled, plain),) = in_world(1, train_all, [on, off])
    assert profiled == plain
    assert same_bits(tmp_path / "on", tmp_path / "off")
    at = [step["at"] for step in check_profile(tmp_path / "on", ranks=1)]
    assert at == sorted(set(at))
    # Of the 6 steps of an epoch, the first follows an evaluation and the last has a smaller batch.
    assert not [step for step in at if step % 6 in (0, 1)]
    assert not any(tag.startswith("profile/") for tag in scalars(tmp_path / "off"))
    assert not (tmp_path / "off" / "trace").exists()


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["profiler.every=0"], "profiler.every=101"),
        (["profiler.trace_steps=0"], "profiler.trace_steps=3"),
        (["strategy=pipeline"], "profiler.enabled=false"),
        (
            ["strategy=async_parameter_server", "launch=spawn", "launch.nproc_per_node=3"],
            "profiler.enabled=false",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_refused(typed, answer):
    with pytest.raises(ConfigError, match=f"type {answer}$"):
        preflight(composed("profiler.enabled=true", *typed))
