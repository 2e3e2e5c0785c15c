"""Commands that hypothesis makes up: each ends in a run that starts, or in one sentence that says what to type.

`make fuzz` runs more of them, with a new seed each time. Commands that once failed are kept here.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings

from support.fuzzed_commands import SMALL, accepted_commands, commands
from support.small_commands import answer_of

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

EXAMPLES = int(os.environ.get("LOCKSTEP_FUZZ_EXAMPLES", "0"))  # of each kind; 0: the number below, always the same ones
FUZZED = settings(
    max_examples=EXAMPLES or 24,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
Start = Callable[[list[str]], None]

# Words, and what the answer says. An empty answer: the run starts.
KEPT = [
    ("task=regression launch=fork", "takes outputs and targets of one shape, and these are [32, 10] and [32]"),
    ("dataset=random model=linear task=classification", "float32; type task=<the one for such targets>"),
    ("dataset.shape=[1,28,4]", "and the samples have the shape [1,8,8]; type dataset.shape=[1,8,8]"),
    (
        "dataset=random model=mlp loader.augment={_target_:lockstep.data.augment.ShiftFlip,flip:true}",
        "loader.augment moves images, and a sample has the shape [20]; type loader.augment=null",
    ),
    ("model.shape=[3,8,8]", "model.shape=[3,8,8], and the samples have the shape [1,8,8]; type model.shape=[1,8,8]"),
    ("~hydra.hydra_logging.formatters.simple", "cannot be composed; type the command without '~hydra"),
    ("optimizer=adamw optimizer.betas=[0.9,0]", "torch.optim.AdamW refuses its arguments"),
]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """start(words): runs the command in a folder of its own, and fails if its end is not one of those allowed."""
    numbers = iter(range(10**9))

    def start_command(words: list[str]) -> None:
        folder = tmp_path / str(next(numbers)) / "deep" / "down"  # a command may write to `..`
        folder.mkdir(parents=True)
        note(f"python src/train.py {words}")
        answer = answer_of(words, folder)
        problem = answer.problem()
        assert problem is None, f"{problem}: {words}\n{answer}"

    return start_command


@FUZZED
@given(words=commands())
def test_any_command_starts_a_run_or_is_refused_with_a_sentence(start: Start, words: list[str]) -> None:
    start(words)


@FUZZED
@given(words=accepted_commands())
def test_options_that_are_accepted_start_a_run_or_are_refused_with_a_sentence(start: Start, words: list[str]) -> None:
    start(words)


@pytest.mark.parametrize(("typed", "said"), KEPT, ids=[typed for typed, _ in KEPT])
def test_commands_that_once_failed(tmp_path: Path, typed: str, said: str) -> None:
    answer = answer_of([*typed.split(), SMALL], tmp_path)
    assert answer.problem() is None, answer
    assert said in answer.output
    assert answer.code == (2 if said else 0), answer
