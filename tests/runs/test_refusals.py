"""Bad input to the real command: one sentence, exit code 2, no traceback, and nothing is left behind."""

import socket

import pytest

from support.commands import PYTHON_TRAIN


def assert_refused(run, *said):
    """Few lines, one of them a sentence; no traceback, no weights, no record of a run."""
    for words in said:
        assert words in run.sentence
    assert "Traceback" not in run.output
    assert "leaked semaphore" not in run.output
    assert len(run.output.splitlines()) <= 5, run.output
    left = [path.name for path in run.cwd.rglob("*")]
    assert not {"model.pt", "snapshots", ".hydra", "train.log"} & set(left)


OWN = ["dataset=pair", "dataset.classes=2", "model=linear"]
BAD = [
    (["hydra/sweeper=optun"], "hydra/sweeper has the options basic, lists, optuna; type hydra/sweeper="),
    (["hydra.run.dir=/etc/passwd"], "/etc/passwd cannot be written (File exists); type hydra.run.dir="),
    (["-m", "hydra.sweep.dir=/proc/x", "seed=1,2"], "the run folder /proc/x cannot be written"),
    (["-m", "optimizer.lr=interval(0.1,1)"], "type hydra/sweeper=optuna hydra.sweeper.n_trials=20"),
    (["backend=mpi"], "backend=mpi needs a torch that was built with MPI; type backend=gloo, under mpirun, too"),
    (["optimizer.lr=nan", "launch=torchrun"], "optimizer.lr=nan should be a finite number; type optimizer.lr=<value>"),
    (["model.shape=[8,8,1]"], "these are [8, 8, 1]; return image.permute(2, 0, 1) from __getitem__, or type model=mlp"),
    (["dataset=mnist", "data_dir=empty", "launch=fork"], "than empty>"),
]
# What a rank alone can know.
FOUND_BY_RANKS = [
    (["step=cuda_graph"], "step=cuda_graph records what one rank computes on a GPU; type step=default"),
    (["launch=torchrun", "model=resnet18", "model.name=foo"], "no net model.name=foo; type model.name="),
    (["launch=torchrun", "dataset.classes=5"], "and the classes are 0 to 4; type dataset.classes="),
    (["launch=fork", "task.class_weights=[1,2]"], "has 2 weights, and there are 10 classes; type task.class_weights="),
    (
        ["launch=fork", "+evaluation.metrics.mean={_target_:torchmetrics.MeanMetric}", "monitor=val/mean"],
        "torchmetrics.MeanMetric does not say whether more of it is better; type monitor=val/loss, or",
    ),
    (["launch=fork", "Words"], "CrossEntropy takes logits (N, classes, ...) and class numbers (N, ...), whole ones"),
    (
        ["+evaluation.metrics.f1={_target_:torchmetrics.F1Score,task:multiclass,num_classes:3}"],
        "type evaluation.metrics.f1.num_classes=10",
    ),
]


@pytest.mark.parametrize(("typed", "said"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_ends_in_one_sentence(train, typed, said):
    assert_refused(train(*typed, code=2), said)


@pytest.mark.parametrize(("typed", "said"), FOUND_BY_RANKS)
def test_what_a_rank_alone_can_know_is_one_sentence_too(train, typed, said):
    *words, name = typed
    if "=" not in name:  # one of support.own_data
        name = [*OWN, *(f"dataset.{half}._target_=support.own_data.{name}" for half in ("train", "test"))]
    run = train(*words, *([name] if isinstance(name, str) else name), code=2)
    assert said in run.sentence
    assert "Traceback" not in run.output
    assert not list(run.cwd.rglob("model.pt"))


def test_a_launcher_inside_a_launcher_is_refused(start):
    run = start(*PYTHON_TRAIN, "launch=torchrun", RANK=0, WORLD_SIZE=2, TORCHELASTIC_RUN_ID="none").finish(2)
    assert "a launcher inside torchrun would start every rank several times; type launch=env" in run.sentence


def test_an_occupied_port_is_named_with_a_free_one(start):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        run = start(*PYTHON_TRAIN, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port).finish(2)
    assert f"port {port} is taken" in run.sentence
    assert f"MASTER_PORT={port + 1}" in run.sentence


def test_a_rank_that_is_no_number_is_refused(start):
    run = start(*PYTHON_TRAIN, RANK="abc", WORLD_SIZE=2).finish(2)
    assert_refused(run, "RANK=abc in the environment is not a whole number; type `unset RANK WORLD_SIZE`")
