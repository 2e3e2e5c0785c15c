"""trainer.profile=on: what takes long is what is shown to take long, in TensorBoard and in the trace; and nothing else changes."""

import json
import os
import statistics
import sys
import time

import pytest
import torch

from conftest import events, in_world
from lockstep import datasets, models
from lockstep.refusal import Refusal
from test_configs import composed

PARTS = ("data", "forward", "backward", "gradient_sync", "optimizer", "logging")
SMALL = ["model=mlp", "trainer.batch_size=240", "trainer.epochs=4"]  # 5 whole batches an epoch, and a smaller one
OFTEN = ["timeline.every=2", "timeline.trace_after=2", "timeline.trace_steps=2"]


def work(cfg):
    import train

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return train.work(cfg)


def measured(folder):
    """[{part: milliseconds}, ...] of the steps that were measured, with their numbers as "at"."""
    shown = {tag.removeprefix("profile/").removesuffix("_ms"): points for tag, points in events(folder).items() if tag.startswith("profile/")}
    steps = [step for step, _ in shown.get("step", [])]
    return [{"at": step, **{part: points[number][1] for part, points in shown.items()}} for number, step in enumerate(steps)]


def check(folder, ranks):
    """Every measured step's parts make up the step, and every rank has traced the parts of two steps."""
    steps = measured(folder)
    assert steps
    for step in steps:
        assert step.keys() == {"at", "step", *PARTS}
        assert sum(step[part] for part in PARTS) == pytest.approx(step["step"], rel=1e-5)
        assert all(step[part] > 0 for part in PARTS)
    traces = sorted((folder / "trace").iterdir())
    assert [path.name.split(".")[0] for path in traces] == [f"rank{rank}" for rank in range(ranks)]
    for path in traces:
        assert path.name.endswith(".pt.trace.json")
        names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]
        assert {name for name in names if name.startswith("ProfilerStep")} == {"ProfilerStep#1", "ProfilerStep#2"}
        assert {f"lockstep: {part}": 2 for part in PARTS if part != "gradient_sync"}.items() <= {name: names.count(name) for name in names}.items()
    return steps


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_shows_where_its_time_goes_and_trains_as_ever(tmp_path, ranks):
    asked = ["trainer.profile=on", *OFTEN]
    scores = {}
    for name, overrides in (("on", asked), ("off", [])):
        scores[name] = in_world(ranks, work, composed(f"run_dir={tmp_path / name}", *SMALL, *overrides))
    assert scores["on"] == scores["off"]
    one, other = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in scores)
    assert all(torch.equal(one[name], other[name]) for name in one)
    steps = [step["at"] for step in check(tmp_path / "on", ranks)]
    assert steps == sorted(set(steps))
    assert not [step for step in steps if step % 6 in (0, 1)]  # no smaller batch, and no step that follows an evaluation
    assert not any(tag.startswith("profile/") for tag in events(tmp_path / "off"))
    assert not (tmp_path / "off" / "trace").exists()


class SlowDigits(torch.utils.data.Dataset):
    """Digits that take 1 ms each."""

    def __init__(self, train):
        self.samples, self.targets = datasets.digits(train)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.001)
        return self.samples[index], self.targets[index]


class SlowBackward(torch.autograd.Function):
    """10 ms on rank 0, 100 ms on rank 1."""

    @staticmethod
    def forward(context, outputs):
        return outputs.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(0.1 if os.environ["RANK"] == "1" else 0.01)
        return gradient


class SlowNet(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.net = models.mlp(**options)

    def forward(self, inputs):
        time.sleep(0.015)
        return SlowBackward.apply(self.net(inputs))


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.02)
        return super().step(closure)


def test_what_takes_long_is_what_is_shown_to_take_long(tmp_path):
    slow = ["dataset.train._target_=test_profile.SlowDigits", "model._target_=test_profile.SlowNet", "optimizer._target_=test_profile.SlowSGD"]
    cfg = composed(f"run_dir={tmp_path}", *SMALL, "trainer.batch_size=16", "trainer.profile=true", *OFTEN, *slow)
    in_world(2, work, cfg)
    steps = check(tmp_path, 2)
    usual = {part: statistics.median(step[part] for step in steps) for part in PARTS}
    assert usual["data"] >= 8  # samples
    assert usual["forward"] >= 15
    assert usual["backward"] >= 10
    assert usual["gradient_sync"] >= 40  # rank 0 waits for rank 1
    assert usual["optimizer"] >= 20


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, ["trainer.accumulate=3", "trainer.clip_norm=1.0", "trainer.ema=0.9", "gradient_sync=ring"]),
        (2, ["strategy=fsdp", "trainer.accumulate=2"]),
        (2, ["strategy=shards", "trainer.shards=4"]),
        (2, ["strategy=model_parallel"]),
        (1, ["strategy=dp", "trainer.precision=bf16"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_it_works_with(tmp_path, ranks, how):
    in_world(ranks, work, composed(f"run_dir={tmp_path}", *SMALL, "trainer.profile=on", *OFTEN, *how))
    steps = measured(tmp_path)
    assert steps
    assert all(step[part] > 0 for step in steps for part in PARTS)


def compiled(**options):
    net = models.mlp(**options)
    net.compile(backend="eager")
    return net


def graphs(cfg):
    work(cfg)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_compiled_net_is_not_compiled_again_to_be_watched(tmp_path):
    common = ["model=mlp", "model._target_=test_profile.compiled", "trainer.max_steps=20", *OFTEN]
    counts = [in_world(1, graphs, composed(f"run_dir={tmp_path / how}", *common, f"trainer.profile={how}")) for how in ("off", "on")]
    assert counts[0] == counts[1] > [0]
    assert measured(tmp_path / "on")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["trainer.profile=yes"], "try trainer.profile=on"),
        (["trainer.profile=on", "timeline.every=0"], "try timeline.every=101"),
        (["trainer.profile=on", "strategy=pipeline"], "type trainer.profile=off"),
        (["trainer.profile=on", "strategy=async_parameter_server", "launch=spawn", "launch.nproc_per_node=3"], "type trainer.profile=off"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_refused(typed, said):
    import train

    with pytest.raises(Refusal, match=said):
        train.refuse(composed(*typed))
