"""The benchmarks run: every contender measures itself, and each part writes its tables."""

import os
import sys

import pytest

from support.commands import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import race  # noqa: E402

pytestmark = pytest.mark.drill
ALL = os.environ.get("LOCKSTEP_BENCH") == "all"  # as `make matrices` sets it: each contender, and the bench of a device

TINY = race.Settings(
    os.environ.get("LOCKSTEP_DATA", ""),
    samples=256,
    test_samples=256,
    epochs=1,
    worlds=(2,),
    floor_epochs=1,
    windows=60,
    net_steps=1,
)
NEEDS = {"Lightning": "lightning", "Accelerate": "accelerate"}
# The others differ from these by an option. Of those that run on one process and on two, ours does both here.
NAMES = {"tutorial", "Lockstep", "Lightning"}
if ALL:
    NAMES |= {"references", *NEEDS, race.beside("fp32"), race.beside("bf16, gloo")}
FIELD = [
    one
    for group in race.contenders(TINY)[:2]
    for one in group
    if one.name in NAMES and (one.ranks > 1 or one.name == "Lockstep")
]
FIELD += [one for one in race.contenders(TINY)[2] if one.name == "minimal"]


@pytest.mark.skipif("LOCKSTEP_DATA" not in os.environ, reason="LOCKSTEP_DATA does not say where MNIST lies")
@pytest.mark.parametrize("contender", FIELD, ids=lambda one: f"{one.name}-{one.ranks}")
def test_a_contender_runs_and_measures_itself(contender, tmp_path):
    needs = NEEDS.get(contender.name)
    if needs and not race.version(needs):
        pytest.skip(f"{needs} is not installed; type pip install -r requirements-bench.txt")
    found = race.run(contender, tmp_path / "run")
    assert 0 < found["first_step"] < found["wall"]
    assert 50 < found["private"] <= found["rss"] < 5000
    if contender.name != "minimal":
        assert found["speed"] > 256 / found["wall"]
        assert found["evaluation"] > 256 / found["wall"]
        assert 0 <= found["accuracy"] <= 1
        assert 0 < found["cpu"] < 1000 * 2 * found["wall"] * contender.ranks / 256
    floors = {f"of {name}" for name, ranks in race.FLOORS.items() if ranks == contender.ranks}
    assert {key for key in found if key.startswith("of ")} == (floors if "floor" in contender.parts else set())


@pytest.mark.skipif("LOCKSTEP_DATA" not in os.environ, reason="LOCKSTEP_DATA does not say where tinyshakespeare lies")
@pytest.mark.parametrize("net", race.NETS[1:])  # `make bench` races the other one, too
def test_a_larger_net_trains_beside_its_floor(net, tmp_path):
    (one,) = [one for one in race.contenders(TINY)[0] if one.name == race.beside(net)]
    assert race.run(one, tmp_path / "run")["of bare loop"] > 0


@pytest.mark.skipif("LOCKSTEP_DATA" not in os.environ, reason="LOCKSTEP_DATA does not say where tinyshakespeare lies")
@pytest.mark.parametrize("contender", race.writers(TINY), ids=lambda one: one.name)
def test_a_gpt_trains_and_measures_itself(contender, tmp_path):
    found = race.run(contender, tmp_path / "run")
    assert found["speed"] > 60 / found["wall"]
    assert 0 < found["first_step"] < found["wall"]
    assert 0 < found["cpu"] < 1000 * 2 * found["wall"] / 60


def test_a_part_that_does_not_exist_is_refused(start):
    output = start(sys.executable, ROOT / "bench" / "race.py", "--only=speed").finish(code=1).output
    assert "--only: unknown part speed; type --only= and some of train,floor" in output


def table_rows(path):
    return [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")]


def test_growth_gives_a_verdict_for_each_cost(start, tmp_path):
    start(sys.executable, ROOT / "bench" / "growth.py", "--quick", "--only=batch", f"--out={tmp_path}").finish()
    head, _, *rows = table_rows(tmp_path / "growth.md")
    assert [row[:2] for row in rows] == [["batch", "ms a step"], ["batch", "CPU ms a step"]]
    assert {row[-1][:6] for row in rows} <= {"grows ", "FASTER"}


def test_counted_bytes_are_those_of_the_formula(start, tmp_path):
    command = [ROOT / "bench" / "costs.py", "--quick", "--only=gradient_sync", f"--out={tmp_path}"]
    start(sys.executable, *command).finish()
    _, _, *rows = table_rows(tmp_path / "costs.md")
    assert [row[1] for row in rows] == ["all_reduce", "ring", "parameter_server", "bf16"]
    for _, _, _, rank_zero, formula, others, others_formula, *_ in rows:
        for sent, expected in ((rank_zero, formula), (others, others_formula)):
            sent, expected = (float(cell.removesuffix(" MB")) for cell in (sent, expected))
            assert expected <= sent <= 1.03 * expected + 0.002  # headers and votes come on top


def test_an_index_of_many_samples_costs_little_at_the_start(start, tmp_path):
    start(sys.executable, ROOT / "bench" / "data.py", "--quick", "--only=start", f"--out={tmp_path}").finish()
    _, _, whole, _ = table_rows(tmp_path / "data.md")
    assert float(whole[2]) < 100


@pytest.mark.skipif(not ALL, reason="minutes; make matrices runs it")
@pytest.mark.timeout(900)
def test_the_bench_of_one_device_writes_its_tables(start, tmp_path):
    command = [ROOT / "bench" / "gpu.py", "--quick", f"--out={tmp_path}"]
    start(sys.executable, *command, CUDA_VISIBLE_DEVICES="").finish(limit=800)
    text = (tmp_path / "gpu.md").read_text()
    assert text.startswith("## One device: ")
    rows = [row[0] for row in table_rows(tmp_path / "gpu.md")]
    assert [row for row in rows if "=" not in row and "---" not in row and "GFLOP" not in row] == [
        "false",  # host syncs
        "in turns with a bare loop",
        "convnet",
        "resnet18",
        "gpt",
        "false",  # cifar10_speed
    ]
    assert "failed" not in text


def test_without_a_gpu_all_is_a_sentence(start):
    run = start(sys.executable, ROOT / "bench" / "gpu.py", "--all", CUDA_VISIBLE_DEVICES="").finish()
    assert "There is no GPU here" in run.output
