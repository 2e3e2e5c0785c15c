"""Values that cannot work are refused with a sentence that names the key and ends in what to type."""

import re
from typing import Any

import pytest

from support.refusals import answer, assert_advice_helps

NPROC = "must be a whole number of 1 or more, auto, gpu or cpu; type launch.nproc_per_node=2"
BETAS = "must be a list of 2 items, each a number from 0 to less than 1; type optimizer.betas=[0.9,0.999]"
PLACES = "must be epochs, steps or minutes, such as 1epochs, 50steps or 10min; type snapshot.every=1epochs"

# The last word typed is the one that cannot work. The sentence begins with its key.
OUT_OF_RANGE = [
    ("optimizer.lr=nan", "must be a number above 0; type optimizer.lr=0.05"),
    ("optimizer.lr=inf", "must be a number above 0"),
    ("optimizer.lr=-0.1", "must be a number above 0"),
    ("optimizer._target_=torch.optim.LBFGS", "computes the loss again and again in a step; type optimizer=adamw"),
    ("optimizer._target_=torch.optim.SparseAdam", "needs sparse gradients; type optimizer=adamw"),
    ("optimizer._target_=torch.optim.Muon", "is for matrices only; type optimizer=muon, which leaves the other"),
    ("optimizer.lr=null", "must be a number above 0"),
    ("optimizer.lr=high", "must be a number above 0"),
    ("optimizer.momentum=-1", "must be a number from 0 to less than 1"),
    ("optimizer.weight_decay=-1", "must be a number of 0 or more"),
    ("optimizer.nesterov=maybe", "must be true or false; type optimizer.nesterov=true or optimizer.nesterov=false"),
    ("optimizer.momentum=0 optimizer.nesterov=true", "needs a momentum above 0; type optimizer.momentum=0.9"),
    ("optimizer=adamw optimizer.betas=0.9", BETAS),
    ("optimizer=adamw optimizer.betas=[0.9]", BETAS),
    ("optimizer=adamw optimizer.betas=[0.9,1.5]", BETAS),
    ("optimizer=adamw optimizer.betas=[0.9,x]", BETAS),
    ("seed=abc", "must be a whole number from 0 to 9223372036854775807; type seed=0"),
    ("seed=null", "must be a whole number from 0"),
    ("seed=-1", "must be a whole number from 0"),
    ("data_dir=null", "must be text; type data_dir=data"),
    ("dataset.workers=-1", "must be a whole number of 0 or more"),
    ("dataset.classes=5", "must be a whole number of 10 or more; type dataset.classes=10"),
    ("dataset.augment.pad=-1", "must be a whole number of 0 or more"),
    ("dataset.augment.flip=3", "must be alternating, true or false; type dataset.augment.flip="),
    ("dataset.mean=[0.1,0.2,0.3]", "must be a list of 1, one number for each channel of images of shape [1,8,8]; type"),
    ("dataset=cifar10 dataset.std=[0.1,0.2]", "must be a list of 3, one number for each channel"),
    ("dataset=cifar10 dataset.mean=[0.5]", "of images of shape [3,32,32]; type dataset.mean=[0.5,0.5,0.5] or"),
    ("dataset.std=[0]", "must be a list of items, each a number above 0, or null"),
    ("trainer.max_time=30", "must be a time such as 90s, 30min or 2h, or null"),
    ("trainer.max_time=0s", "must be a time such as 90s, 30min or 2h"),
    ("trainer.max_time=9steps", "must be a time such as 90s, 30min or 2h"),
    (
        "dataset.sampling=even",
        "must be balanced or weights, or null; type dataset.sampling=balanced or dataset.sampling=weights",
    ),
    ("task.class_weights=even", "must be balanced, or a list with a weight of 0 or more for each class, or null; type"),
    ("task.class_weights=[1,-1]", "must be balanced, or a list with a weight of 0 or more for each class"),
    ("task.class_weights=[1,2]", "has 2 weights, and there are 10 classes; type task.class_weights=balanced, or a"),
    (
        "task.class_weights=[0,0,0,0,0,0,0,0,0,0]",
        "has no weight above 0, so no sample counts; type task.class_weights=bal",
    ),
    (
        "task.loss={_target_:torch.nn.CrossEntropyLoss} task.class_weights=balanced",
        "weighs the task's own loss, which task.loss replaces; type task.class_weights=null, or task.loss=null",
    ),
    (
        "dataset.test=null",
        "leaves nothing to evaluate, and every run is evaluated; type dataset.test='${dataset.train}'",
    ),
    ("backend.timeout=0.5", "must be a number of 1 or more; type backend.timeout=300"),
    ("backend.timeout=abc", "must be a number of 1 or more"),
    ("backend.name=tcp", "must be auto, gloo, nccl or mpi"),
    ("backend.socket_ifname=nope0", "is no network interface of this machine, which has"),
    ("scheduler.warmup_epochs=-1", "must be a number of 0 or more"),
    ("scheduler.final_lr_ratio=-5", "must be a number of 0 or more"),
    ("scheduler=step scheduler.step_epochs=0", "must be a number above 0"),
    ("scheduler=one_cycle scheduler.pct_start=2", "must be a number between 0 and 1, both excluded"),
    ("model=mlp model.depth=-1", "must be a whole number of 0 or more"),
    ("model=mlp model.width=0", "must be a whole number of 1 or more; type model.width=128"),
    ("model=mlp model.dropout=2", "must be a number from 0 to less than 1"),
    ("launch=slurm launch.overrides=[] launch.dry_run=true launch.nodes=0", "must be a whole number of 1 or more"),
    ("launch=slurm launch.overrides=[] launch.dry_run=true launch.time=soon", "must be minutes, such as 30, or a time"),
    ("launch=spawn launch.nproc_per_node=0", NPROC),
    ("launch=torchrun launch.nproc_per_node=0", NPROC),
    ("launch=torchrun launch.nproc_per_node=-1", NPROC),
    ("launch=torchrun launch.nproc_per_node=two", NPROC),
    ("launch=torchrun launch.nproc_per_node=2.5", NPROC),
    ("launch=torchrun launch.nproc_per_node=null", NPROC),
    ("launch=torchrun launch.max_restarts=-1", "must be a whole number of 0 or more"),
    ("launch=spawn launch.master_port=70000", "must be a whole number from 0 to 65535"),
    ("launch=spawn launch.start_method=thread", "must be spawn, fork or forkserver"),
    ("launch=spawn launch.master_port=1 launch.nnodes=2 launch.node_rank=2", "type launch.node_rank=0 to 1"),
    (
        "launch=spawn launch.nproc_per_node=4 trainer.batch_size=3",
        "too small for 4 ranks; type trainer.batch_size=4",
    ),
    ("trainer.epochs=ten", "must be a whole number of 1 or more; type trainer.epochs=5"),
    ("trainer.epochs=2.5", "must be a whole number of 1 or more"),
    ("trainer.epochs=0", "must be a whole number of 1 or more"),
    ("trainer.epochs=[3]", "must be a whole number of 1 or more"),
    ("trainer.precision=fp8", "must be fp32, bf16, fp16, fp64 or bf16-true; type trainer.precision=fp32"),
    ("trainer.compile=maybe", "must be false, true, reduce-overhead or max-autotune"),
    ("trainer.channels_last=maybe", "must be auto, true or false"),
    ("trainer.ema=1", "must be a number between 0 and 1, both excluded, or null"),
    ("trainer.max_grad_norm=0", "must be a number above 0, or null"),
    ("evaluation.patience=0", "must be a whole number of 1 or more, or null"),
    ("logging.every=0", "must be a whole number of 1 or more"),
    ("snapshot.every=3days", PLACES),
    ("snapshot.every=0steps", PLACES),
    ("gradient_sync=powersgd gradient_sync.start_step=0", "must be a whole number of 2 or more"),
    (
        "strategy=fsdp strategy.wrap_classes=3",
        "each text; type strategy.wrap_classes=[BasicBlock]",
    ),
    (
        "strategy=pipeline strategy.schedule=foo",
        "must be 1F1B or GPipe; type strategy.schedule=1F1B or strategy.schedule=GPipe",
    ),
    ("task.monitor=f1", "is not a metric of this task; type task.monitor=loss or task.monitor=accuracy"),
    ("task.metrics.loss=down", "must be min or max; type task.metrics.loss=min or task.metrics.loss=max"),
    ("objective=train/loss", "must be val/<metric> or test/<metric>; type objective=val/loss"),
    ("dataset.validation=0.1 objective=val/f1", "is not measured; type objective=val/loss or objective=val/accuracy"),
    (
        "dataset.validation=null objective=val/loss",
        "needs a validation set, and there is none; type dataset.validation=",
    ),
    (
        "dataset.validation=1.5",
        "is neither a share below 1 nor a whole number of samples; type dataset.validation=1, or",
    ),
    ("dataset.validation=0", "must be a share below 1, a number of samples, auto or a node with a _target_, or null"),
    ("dataset.validation=10%", "must be a share below 1, a number of samples, auto or a node with a _target_, or null"),
    ("dataset.split_seed=-1", "must be a whole number from 0"),
    ("dataset.folds=1", "must be a whole number of 2 or more, or null; type dataset.folds=5"),
    ("dataset.folds=5", "and no fold is chosen; type dataset.fold=0, or for all of them -m dataset.folds=5"),
    ("dataset.fold=0", "and there are none; type dataset.folds=2"),
    ("dataset.folds=3 dataset.fold=3", "and the folds are 0 to 2; type dataset.folds=4"),
    (
        "dataset.fold=0 dataset.validation={_target_:a.B} dataset.folds=3",
        "and dataset.validation reads other data; type",
    ),
    ("dataset.groups=yes", "must be auto, on or off; type dataset.groups=<one of them>"),
    (
        "dataset.validation=null evaluation.test=never",
        "leaves objective=test/accuracy unread; type evaluation.test=end",
    ),
    ("dataset.validation=null trainer.final=train+val", "and there is none; type trainer.final=null"),
    (
        "trainer.final=train+val sweep.search=halving",
        "sweep.search=halving needs more evaluations than the one at the end of trainer.final=train+val; "
        "type sweep.search=list",
    ),
    (
        "trainer.final=train+val evaluation.patience=3",
        "needs more evaluations than the one at the end of trainer.final=",
    ),
    ("objective=test/f1", "is not measured; type objective=test/loss or objective=test/accuracy"),
    ("resume=nowhere", "does not exist; to start afresh leave resume= out, to resume type resume="),
    ("resume=/etc/passwd", "is not a snapshot; type resume=<the run folder>"),
]
# What several words together cannot be. The whole sentence, without `; type ...`, and what to type.
CONTRADICTIONS = [
    ("backend=mpi", "backend=mpi needs a torch built with MPI", "backend=gloo"),
    (
        "dataset=random",
        "model.shape=[20] must be images of shape [channels,height,width]",
        "model=mlp or model=linear",
    ),
    (
        "launch=torchrun dataset=random",
        "model.shape=[20] must be images",
        "model=mlp or model=linear",
    ),
    ("launch=spawn launch.nnodes=2", "needs a port that all of them know", "launch.master_port=29500 on each"),
    ("launch=fork launch.nnodes=2 launch.master_port=1", "launch=fork is for one machine", "launch=spawn"),
    ("dataset=mnist data_dir=nowhere launch=spawn", "MNIST is not in data_dir=nowhere", "data_dir=<folder that holds"),
    ("strategy=virtual_ranks strategy.count=3 launch=spawn", "cannot be divided among 2 ranks", "strategy.count=4"),
]


@pytest.mark.parametrize(("typed", "said"), OUT_OF_RANGE, ids=[typed for typed, _ in OUT_OF_RANGE])
def test_a_value_that_cannot_work_is_refused(typed: str, said: str) -> None:
    words = typed.split()
    sentence = answer(*words)
    assert sentence is not None
    assert sentence.startswith(f"{words[-1]} "), sentence
    assert said in sentence
    # test_config.py shows that the value in the advice is accepted.
    assert re.match(r"[a-z_.]+=\S", sentence.rpartition(" type ")[2]), sentence


@pytest.mark.parametrize(("typed", "said", "advice"), CONTRADICTIONS, ids=[row[0] for row in CONTRADICTIONS])
def test_words_that_contradict_each_other_are_refused(typed: str, said: str, advice: str, tmp_path: Any) -> None:
    words = [word.replace("=nowhere", f"={tmp_path}") for word in typed.split()]
    sentence = answer(*words)
    assert sentence is not None
    assert said.replace("=nowhere", f"={tmp_path}") in sentence
    assert advice.replace("=nowhere", f"={tmp_path}") in sentence.rpartition("type ")[2]
    assert_advice_helps(words, sentence)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("~task.metrics.loss", "task.metrics has no loss, which every run reports; type ++task.metrics.loss=min"),
        (
            "task=language_modelling +task.metrics.accuracy=max",
            "is not measured by this task, which has loss and perplexity; leave it out, or type task=<an option",
        ),
        (
            "task.loss={_target_:torch.nn.CrossEntropyLoss} task.label_smoothing=0.3",
            "type task.label_smoothing=0, and ++task.loss.label_smoothing=0.3 if your loss takes it",
        ),
        (
            "+task.measures.mine={_target_:torch.nn.CrossEntropyLoss}",
            "is not in task.metrics, which says whether more is better; type +task.metrics.mine=max or",
        ),
        ("task=classification_f1 task.classes=5", "is less than dataset.classes=10; type task.classes=10"),
    ],
)
def test_keys_of_a_task_that_do_not_go_together_are_refused(typed: str, said: str) -> None:
    assert said in str(answer(*typed.split()))
