"""Commands that hypothesis makes up: each ends in a run that starts, or in one sentence that says what to type.

`make fuzz` runs more of them, with a new seed each time. Commands that once failed are kept here.
"""

import os
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import HealthCheck, given, note, settings

from support.fuzzed_commands import SMALL, accepted_commands, commands
from support.small_commands import answer_of

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

EXAMPLES = int(os.environ.get("LOCKSTEP_FUZZ_EXAMPLES", "0"))  # 0: the number below, always the same ones
FUZZED = settings(
    max_examples=EXAMPLES or 40,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)

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
    ("backend=\n", "lockstep: backend=\\n cannot be composed; type the command without 'backend="),
    ("~hydra.hydra_logging.formatters.simple", "cannot be composed; type the command without '~hydra"),
    ("optimizer=adamw optimizer.betas=[0.9,0]", "torch.optim.AdamW refuses its arguments"),
]


@FUZZED
@given(words=commands() | accepted_commands())
def test_any_command_starts_a_run_or_is_refused_with_a_sentence(tmp_path, words):
    folder = Path(mkdtemp(dir=tmp_path)) / "deep" / "down"  # a command may write to `..`
    folder.mkdir(parents=True)
    note(f"python src/train.py {words}")
    answer = answer_of(words, folder)
    problem = answer.problem()
    assert problem is None, f"{problem}: {words}\n{answer}"


@pytest.mark.parametrize(("typed", "said"), KEPT, ids=[typed for typed, _ in KEPT])
def test_commands_that_once_failed(tmp_path, typed, said):
    answer = answer_of([*typed.split(" "), SMALL], tmp_path)
    assert answer.problem() is None, answer
    assert said in answer.output
    assert answer.code == (2 if said else 0), answer
