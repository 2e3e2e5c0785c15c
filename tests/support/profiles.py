"""What a profiled run left in its folder."""

import json
from pathlib import Path

from support.event_files import scalars

PHASES = ("data", "forward", "backward", "gradient_sync", "optimizer", "logging")
OFTEN = ["profiler.enabled=true", "profiler.every=2", "profiler.trace_after=2", "profiler.trace_steps=2"]


def measured_steps(folder: Path) -> list[dict[str, float]]:
    """[{phase: milliseconds, "step": their sum, "at": the step's number}, ...] from TensorBoard's event files."""
    prefix, suffix = "profile/", "_ms"
    points = {
        tag.removeprefix(prefix).removesuffix(suffix): found for tag, found in scalars(folder).items() if prefix in tag
    }
    steps = [step for step, _ in points.get("step", [])]
    return [
        {"at": at, **{phase: found[number][1] for phase, found in points.items()}} for number, at in enumerate(steps)
    ]


def traced_ranges(folder: Path) -> dict[str, list[str]]:
    """{"rank0": the names of the user's ranges in its trace, in order, ...}"""
    found = {}
    for path in sorted((folder / "trace").iterdir()):
        assert path.name.endswith(".pt.trace.json")
        events = json.loads(path.read_text())["traceEvents"]
        found[path.name.split(".")[0]] = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return found


def check_profile(folder: Path, ranks: int) -> list[dict[str, float]]:
    """The phases of every measured step add up to the step, and every rank has traced the phases of two steps."""
    steps = measured_steps(folder)
    assert steps
    for step in steps:
        assert step.keys() == {"at", "step", *PHASES}
        assert abs(sum(step[phase] for phase in PHASES) - step["step"]) <= 1e-5 * step["step"]
        assert all(step[phase] > 0 for phase in PHASES)
    traces = traced_ranges(folder)
    assert list(traces) == [f"rank{rank}" for rank in range(ranks)]
    for names in traces.values():
        assert {name for name in names if name.startswith("ProfilerStep")} == {"ProfilerStep#1", "ProfilerStep#2"}
        for phase in PHASES:
            if phase != "gradient_sync":  # inside the backward pass
                assert names.count(f"lockstep: {phase}") == 2
    return steps
