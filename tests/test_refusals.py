"""Bad input gets a sentence that names the key, says what is wrong and ends in what to type; no process is started."""

import socket
import sys

import pytest

from conftest import TORCHRUN, TRAIN, wait_for


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["trainer.epoch=3"], "type trainer.epochs="),
        (["epochs=3"], "type trainer.epochs="),
        (["nonsense=3"], "nonsense is no key"),
        (["model=convnett"], "type model=convnet"),
        (["trainer.epochs=ten"], "trainer.epochs=ten wants a whole number"),
        (["optimizer.lr=high"], "optimizer.lr=high wants a number"),
        (["trainer.save_every=3days"], "try trainer.save_every=1epochs"),
        (["backend=nccl"], "wants a GPU and this machine shows none; try backend=gloo"),
        (["backend=mpi"], "try backend=gloo"),
        (
            ["launch=spawn", "launch.nproc_per_node=4", "trainer.batch_size=3"],
            "cannot be shared by 4 ranks; try trainer.batch_size=4",
        ),
        (["resume=nowhere"], "resume=nowhere does not exist; type resume="),
        (["dataset=mnist", "data_dir=empty", "launch=spawn"], "or dataset=digits"),
        (["dataset=image_folder"], "type dataset.classes="),
        (["dataset=random"], "try model=mlp or model=linear"),
        (["objective=test/f1"], "type objective=test/loss"),
        (["launch=spawn", "launch.nnodes=2"], "type launch.master_port=29500"),
        (["trainer.shards=4"], "type strategy=shards trainer.shards=4"),
        (["strategy=shards", "trainer.shards=3", "launch=spawn"], "try trainer.shards=4"),
        (["trainer.epochs={"], "type key=value"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input(train, typed, said):
    if typed == ["backend=nccl"] and __import__("torch").cuda.is_available():
        pytest.skip("this machine has a GPU")
    run = train(*typed, code=2)
    (sentence,) = [line for line in run.output.splitlines() if line.startswith("lockstep: ")]
    assert said in sentence
    assert "Traceback" not in run.output
    assert not list(run.cwd.rglob("model.pt"))


def test_a_missing_data_set_names_the_folder_that_was_searched(train):
    run = train("dataset=mnist", "data_dir=empty", code=2)
    assert str(run.cwd / "empty" / "MNIST" / "raw") in run.output


def test_a_launcher_inside_a_launcher(start):
    run = start(*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN, "launch=torchrun").finish(1)
    assert "launch=torchrun inside torchrun would start every rank several times; type launch=env" in run.output


def test_an_occupied_port(start):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        run = start(sys.executable, TRAIN, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port).finish(2)
    assert f"port {port} on 127.0.0.1 is taken" in run.output
    assert f"MASTER_PORT={port + 1}" in run.output


def test_a_sampling_sweeper_under_torchrun(start):
    run = start(sys.executable, TRAIN, "-m", "hydra/sweeper=optuna", RANK=0, WORLD_SIZE=2).finish(2)
    assert "type python src/train.py -m launch=torchrun" in run.output


def test_a_snapshot_of_another_model_or_optimizer(train):
    made = train("trainer.epochs=1")
    run = train("model=mlp", "optimizer=adamw", f"resume={made.folder}", code=2)
    assert "does not fit this run" in run.output
    for key in ("model._target_", "model.width", "optimizer"):
        assert f"{key} (" in run.output
    assert "Traceback" not in run.output


def test_a_second_run_on_one_folder(start):
    first = start(sys.executable, TRAIN, "hydra.run.dir=shared", "trainer.epochs=300")
    lock = first.cwd / "shared" / ".lock"
    wait_for(lambda: lock.exists() and lock.read_text(), "lock")
    second = start(sys.executable, TRAIN, "hydra.run.dir=shared").finish(2)
    assert f"another run holds {first.cwd}/shared (pid {first.process.pid} on " in second.output
    first.process.kill()  # a dead holder holds nothing
    start(sys.executable, TRAIN, "hydra.run.dir=shared", "trainer.epochs=1").finish()
