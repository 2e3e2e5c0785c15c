"""The benchmarks run: every contender measures itself, and each part writes its tables."""

import os
import sys

import pytest

from support.commands import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import race  # noqa: E402

pytestmark = pytest.mark.drill
ALL = os.environ.get("LOCKSTEP_BENCH") == "all"  # as `make matrices` sets it: each contender, and the bench of a device

DATA = os.environ.get("LOCKSTEP_DATA", "")
TINY = race.Settings(
    DATA, samples=256, test_samples=256, epochs=1, worlds=(2,), floor_epochs=1, windows=60, net_steps=1
)
GROUPS = list(race.groups(TINY))
# The others differ from these by an option. Of those that run on one process and on two, ours does both here.
NAMES = {"tutorial", "Lockstep"}
if ALL:
    NAMES |= {"references", "Lightning", "Accelerate", "beside floors, fp32", "beside floors, bf16, gloo"}
FIELD = [
    (group, name)
    for group in GROUPS
    for name in group.commands
    if (group.part in ("train", "floor") and name in NAMES and (group.ranks > 1 or name == "Lockstep"))
    or (name == "minimal" and group.ranks == 1)
]
needs_data = pytest.mark.skipif(not DATA, reason="LOCKSTEP_DATA does not say where MNIST and tinyshakespeare lie")


@needs_data
@pytest.mark.parametrize(("group", "name"), FIELD, ids=[f"{name}-{group.ranks}" for group, name in FIELD])
def test_a_contender_runs_and_measures_itself(group, name, tmp_path):
    if name in ("Lightning", "Accelerate"):
        pytest.importorskip(name.lower(), reason="not installed; type pip install -r requirements-bench.txt")
    found = race.run(group, name, tmp_path / "run")
    assert 0 < found["first_step"] < found["wall"]
    assert 50 < found["private"] <= found["rss"] < 5000
    if name != "minimal":
        assert min(found["speed"], found["evaluation"]) > 256 / found["wall"]
        assert 0 <= found["accuracy"] <= 1
        assert 0 < found["cpu"] < 1000 * 2 * found["wall"] * group.ranks / 256
    floors = {f"of {floor}" for floor, ranks in race.FLOORS.items() if ranks == group.ranks}
    assert {key for key in found if key.startswith("of ")} == (floors if "floor" in name else set())


@needs_data
def test_a_larger_net_trains_beside_its_floor_and_a_gpt_measures_itself(tmp_path):
    beside, *_ = (group for group in GROUPS if group.part == "nets")  # `make bench` races ResNet-18, too
    assert race.run(beside, "beside floors, GPT", tmp_path / "beside")["of bare loop"] > 0
    (writers,) = (group for group in GROUPS if group.part == "text")
    for number, name in enumerate(writers.commands):
        found = race.run(writers, name, tmp_path / f"writer{number}")
        assert found["speed"] > 60 / found["wall"]
        assert 0 < found["first_step"] < found["wall"]
        assert 0 < found["cpu"] < 1000 * 2 * found["wall"] / 60


@pytest.fixture
def written(start, tmp_path):
    """written(script, *words) -> the rows of its table, the head first."""

    def made(script, *words, **options):
        command = [sys.executable, ROOT / "bench" / f"{script}.py", "--quick", *words, f"--out={tmp_path}"]
        start(*command, CUDA_VISIBLE_DEVICES="").finish(**options)
        lines = [line for line in (tmp_path / f"{script}.md").read_text().splitlines() if line.startswith("| ")]
        return [line.strip("| ").split(" | ") for line in lines]

    return made


def test_what_does_not_exist_is_a_sentence(start):
    output = start(sys.executable, ROOT / "bench" / "race.py", "--only=speed").finish(code=1).output
    assert "--only: unknown part speed; type --only= and some of train,floor" in output
    run = start(sys.executable, ROOT / "bench" / "gpu.py", "--all", CUDA_VISIBLE_DEVICES="").finish()
    assert "There is no GPU here" in run.output


def test_growth_gives_a_verdict_for_each_cost(written):
    _, _, *rows = written("growth", "--only=batch")
    assert [row[:2] for row in rows] == [["batch", "ms a step"], ["batch", "CPU ms a step"]]
    assert {row[-1][:6] for row in rows} <= {"grows ", "FASTER"}


def test_counted_bytes_are_those_of_the_formula(written):
    _, _, *rows = written("costs", "--only=gradient_sync")
    assert [row[1] for row in rows] == ["all_reduce", "ring", "parameter_server", "bf16"]
    for _, _, _, rank_zero, formula, others, others_formula, *_ in rows:
        for pair in ((rank_zero, formula), (others, others_formula)):
            sent, expected = (float(cell.removesuffix(" MB")) for cell in pair)
            assert expected <= sent <= 1.03 * expected + 0.002  # headers and votes come on top


def test_an_index_of_many_samples_costs_little_at_the_start(written):
    _, _, whole, _ = written("data", "--only=start")
    assert float(whole[2]) < 100


@pytest.mark.skipif(not ALL, reason="minutes; make matrices runs it")
@pytest.mark.timeout(900)
def test_the_bench_of_one_device_writes_its_tables(written, tmp_path):
    rows, text = [row[0] for row in written("gpu", limit=800)], (tmp_path / "gpu.md").read_text()
    assert text.startswith("## One device: ")
    assert [row for row in rows if "=" not in row and "---" not in row] == [
        "in turns with a bare loop", "convnet", "resnet18", "gpt", "false"
    ]  # fmt: skip
    assert "failed" not in text
