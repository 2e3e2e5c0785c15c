"""`python src/runs.py again`: the same bits, other bits, or a refusal that names what differs."""

import sys
from pathlib import Path

from support.commands import PYTHON_TRAIN, ROOT, Command

RUN = "lr=0.1"  # as a sweep names a folder
OWN_DATA = """
from pathlib import Path
import torch
from lockstep.data.builtin.digits import digits
from lockstep.models.mlp import mlp

def data(train):
    found = digits(train)
    if Path(f"other_row_train={train}").exists():
        found.samples[1, 0, 0, 0] += 1
    return found

def net(**arguments):
    model = mlp(**arguments)
    if Path("other_weight").exists():
        with torch.no_grad():
            model[1].bias[0] += 1
    return model
"""
TYPED = ["model=mlp", "model.width=16", "logger=[]", "trainer.max_steps=30", "trainer.digest=5", "launch=fork"]
TYPED += [f"dataset.{half}._target_=own_data.data" for half in ("train", "test")]
TYPED += ["model._target_=own_data.net"]


def again(folder: Path, code: int, *words: str) -> Command:
    """`python src/runs.py again run`, with another working directory than that of the run."""
    command = [sys.executable, str(ROOT / "src" / "runs.py"), "again", str(folder / RUN), *words]
    return Command(command, folder.parent, PYTHONPATH=folder).finish(code)


def test_a_run_is_repeated_or_what_differs_is_named(tmp_path: Path) -> None:
    here = tmp_path / "project"
    here.mkdir()
    module = here / "own_data.py"
    module.write_text(OWN_DATA)
    Command([*PYTHON_TRAIN, *TYPED, f'hydra.run.dir="{RUN}"'], here, PYTHONPATH=here).finish()
    same = again(here, 0)
    assert "again: the same bits: model.pt; best evaluations so far: 2; steps with digests: 6\n" in same.output
    assert (here / f"{RUN}-again" / "run.json").exists()
    assert f"{RUN}-again exists already; type --into" in again(here, 2, "--into", str(here / f"{RUN}-again")).sentence

    (here / "other_weight").touch()  # which nothing in run.json shows
    other = again(here, 1)
    assert "again: other bits\n" in other.output
    assert "the same: config, code, environment, data, ranks\n" in other.output
    assert "the runs part at step " in other.output

    for half in ("training", "test"):  # one bit in one row
        flag = here / f"other_row_train={half == 'training'}"
        flag.touch()
        refused = again(here, 2)
        assert f"/{RUN} cannot be repeated here: {half}_data was " in refused.sentence
        flag.unlink()
    assert not list((here / f"{RUN}-again-3").glob("snapshots/*"))
    assert not (here / f"{RUN}-again-3" / "run.json").exists()
    module.write_text(OWN_DATA + "# edited\n")
    assert f"/{RUN} cannot be repeated here: own_data was " in again(here, 2).sentence
