"""Values from environment variables are used, and no file of a run has them."""

import zipfile

import pytest

from support.commands import PYTHON_TRAIN
from support.ports import free_port

SECRET, CHANGED = "kqzvTheSecretOfTheRun", "kqzvAnotherSecret"
OWN_MODEL = """
from lockstep.models.tutorial import linear

def model(shape, classes, token, copy, header, tokens):
    assert token.startswith("kqzv") and token == copy == tokens[1] == header["value"]
    print("the model has its token of", len(token), "letters")
    return linear(shape, classes)
"""
TYPED = ["model=linear", "model._target_=own_secret.model", "hydra.run.dir=run", "+model.token=${oc.env:RUN_TOKEN}"]
TYPED += ["+model.copy=${model.token}", "+model.header={value: '${oc.env:RUN_TOKEN}'}"]
TYPED += ["+model.tokens=[public,'${model.copy}']"]


def assert_nowhere(folder, output):
    """None of the secrets is in the output, or in any file of `folder`."""
    assert "kqzv" not in output
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        contents = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        assert not [content for content in contents if b"kqzv" in content], path


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own_secret.py").write_text(OWN_MODEL)
    return {"PYTHONPATH": str(tmp_path), "RUN_TOKEN": SECRET}


def test_no_file_of_a_run_has_a_value_of_the_environment(start, own):
    run = start(*PYTHON_TRAIN, "launch=torchrun", *TYPED, "trainer.epochs=1", **own).finish()
    assert f"its token of {len(SECRET)} letters" in run.output
    again = start(*PYTHON_TRAIN, *TYPED, "trainer.epochs=2", **own | {"RUN_TOKEN": CHANGED}).finish()
    assert "resumed from" in (run.cwd / "run" / "train.log").read_text()
    assert_nowhere(run.cwd / "run", run.output + again.output)
    assert "token: ${oc.env:RUN_TOKEN}" in (run.cwd / "run" / ".hydra" / "config.yaml").read_text()


def test_ranks_with_different_values_are_told_apart_without_the_values_and_a_script_has_what_was_typed(start, own):
    world = own | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    tokens = {"0": SECRET, "1": CHANGED}
    ranks = [start(*PYTHON_TRAIN, *TYPED, **world | {"RANK": n, "RUN_TOKEN": token}) for n, token in tokens.items()]
    output = "".join(rank.finish(2).output for rank in ranks)
    assert "model.copy differs between ranks: '${model.token}' on rank 0 and '${model.token}' on rank 1" in output
    assert_nowhere(ranks[0].cwd / "run", output)
    words = ["launch=slurm", "launch.dry_run=true", "data_dir=${oc.env:RUN_TOKEN}", "hydra.run.dir=50%run"]
    output = start(*PYTHON_TRAIN, *words, RUN_TOKEN=SECRET).finish().output
    assert "'data_dir=${oc.env:RUN_TOKEN}'" in output
    assert "kqzv" not in output
    assert "/50%run" in output
