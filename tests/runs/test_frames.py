"""How many calls of this project lie between `main` and a backward pass, which a reader has to follow.

In the first step one more looks at what the net draws, and in all steps of a net that has dropout.
"""

from pathlib import Path
from typing import Any

from support.commands import ROOT

CALLS = [
    "train.py:main",
    "lockstep/launchers/env.py:launch",
    "lockstep/modes/train.py:work",
    "lockstep/training/loop.py:fit",
    "lockstep/training/step.py:__call__",
    "lockstep/strategies/base.py:forward_backward",
]


def test_a_backward_pass_is_six_calls_below_main(train: Any, tmp_path: Path) -> None:
    words = ["model=mlp", "model._target_=support.frames.NotingNet", "trainer.max_steps=2", "hydra.run.dir=run"]
    train(*words, PYTHONPATH=ROOT / "tests")
    places = [line.partition(f"{ROOT}/src/") for line in (tmp_path / "frames.txt").read_text().splitlines()]
    own = [place for _, found, place in places if found]
    below_main = own[own.index("train.py:main") :]
    print("\n".join(below_main))
    assert below_main == CALLS
