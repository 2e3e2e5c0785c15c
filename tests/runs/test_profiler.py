"""trainer.profiler: a trace of some steps of each rank, and the same bits."""

import json
from pathlib import Path

from support.configs import composed
from support.worlds import in_world, same_bits, train_all

TRACED = "trainer.profiler={_target_:lockstep.training.profile.Profiler,after:3,steps:2}"


def test_a_profiled_run_has_a_trace_of_its_steps_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    on, off = tmp_path / "on", tmp_path / "off"
    small = ["model=mlp", "trainer.batch_size=240", "trainer.epochs=2", "logger=[]"]
    in_world(2, train_all, [composed(f"run_dir={on}", *small, TRACED), composed(f"run_dir={off}", *small)])
    assert same_bits(on, off)
    traces = sorted((on / "trace").iterdir())
    assert [path.name.split(".")[:2] for path in traces] == [["rank0", "3"], ["rank1", "3"]]
    for path in traces:
        names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
        assert len({name for name in names if name.startswith("ProfilerStep")}) == 2
        assert names.count("aten::cross_entropy_loss") == 2
    assert not (off / "trace").exists()
