"""Ranks that hang, fail and are killed: real processes without torch that share a folder, as in a training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import ROOT

PYTHONPATH = f"{ROOT / 'src'}:{ROOT / 'tests'}"


def ranks(folder: Path, what: str) -> tuple[str, dict[str, int]]:
    """(what the two ranks print, their exit codes) if rank 1 does this."""
    command = [sys.executable, str(ROOT / "tests/support/lone_ranks.py"), str(folder), what]
    found = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": PYTHONPATH}, check=True)
    *words, codes = (found.stderr + found.stdout).splitlines()
    return "\n".join(words), json.loads(codes)


@pytest.mark.parametrize(
    ("what", "verdict", "place"),
    [
        ("sleeps", "a rank is in user code", "in sleeps: time.sleep(100)"),
        ("is_stopped", "a rank is stopped", "is stopped by SIGSTOP"),
        ("holds_the_lock", "a rank is in user code", "holds Python's lock or waits in the kernel, at "),
    ],
)
def test_a_rank_that_hangs_is_named_and_ended(tmp_path: Path, what: str, verdict: str, place: str) -> None:
    said, codes = ranks(tmp_path, what)
    assert "lockstep: rank 1 of 2 hangs" in said
    assert f"verdict: {verdict}" in said
    assert place in said
    assert codes == {"0": 4, "1": 4 if what == "sleeps" else -9}


def test_a_rank_that_computes_is_only_slow(tmp_path: Path) -> None:
    said, codes = ranks(tmp_path, "computes")
    assert "and the run goes on: rank 1 computes in the phase train, at " in said
    assert codes == {}


@pytest.mark.parametrize(
    ("what", "words", "codes"),
    [
        ("raises", "ValueError: a mistake", [1, 1]),
        ("is killed", "its starter has taken the exit code", [1, -9]),
        ("leaves", "or it left by a call of exit()", [1, 3]),
    ],
)
def test_one_rank_tells_of_the_first_failure(tmp_path: Path, what: str, words: str, codes: list[int]) -> None:
    said, found = ranks(tmp_path, what)
    assert "tells:\nlockstep: rank 1 of 2 failed first " in said
    assert said.count("tells:") == 1
    assert words in said
    assert [found["0"], found["1"]] == codes
    assert json.loads((tmp_path / "failure.json").read_text())["first"]["rank"] == 1
    assert not (tmp_path / "ranks").exists()
    of_torchrun = {path.stem: json.loads(path.read_text())["timestamp"] for path in tmp_path.glob("error*.json")}
    assert min(of_torchrun, key=lambda name: of_torchrun[name]) == f"error{1 if what == 'raises' else 0}"


def test_a_refused_rank_shows_its_sentence_and_ranks_that_end_well_leave_nothing(tmp_path: Path) -> None:
    said, codes = ranks(tmp_path, "is refused")
    assert said == "rank 1 tells: x=1 is wrong; type x=2"
    assert codes == {"0": 2, "1": 2}
    assert ranks(tmp_path, "ends well") == ("", {"0": 0, "1": 0})
    assert not (tmp_path / "ranks").exists()
