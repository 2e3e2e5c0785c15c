"""Unknown words are answered with what was probably meant."""

import enum
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from lockstep.cli import prepare_arguments, refuse_sampling_sweep
from lockstep.distributed.environment import RankInfo
from lockstep.errors import ConfigError
from support.refusals import answer, assert_advice_helps

OPTIONS_OF_NPROC = "launch.nproc_per_node is a key of launch=fork, spawn and torchrun"
ALL_KEYS = "type python src/train.py --cfg job to see all keys"

ANSWERS = [
    ("+experiment=x", "experiment=x is no option; type one of experiment=cifar10_speed experiment=image"),
    ("experiment=null", "experiment=null is no option; type the command without it"),
    ("logger=null", "the list of loggers cannot be removed; type logger=[]"),
    ("logger=[csv,foo]", "logger=foo is no option; type one of logger=console"),
    ("model=convnett", "model=convnett is no option; type model=convnet"),
    ("dataset=Digits", "dataset=Digits is no option; type dataset=digits"),
    ("+model=mlp", "model is a config group, which +model cannot add; type model=mlp"),
    ("++logger=csv", "logger is a config group, which ++logger cannot add; type +logger=csv"),
    ("modle=mlp", "modle is no key of this config; type model=mlp"),
    ("=3", "=3 has no key; type <key>=<value>"),
    ("+", "+ has no key; type <key>=<value>"),
    ("foo", f"foo is no key of this config; {ALL_KEYS}"),
    ("model=[mlp,convnet]", "chooses several options, and a run has one; type model=mlp, or for a sweep -m model=mlp,"),
    ("model=mlp,convnet", "model=mlp,convnet is a sweep; type -m model=mlp,convnet"),
    ("optimizer.lr=interval(0.1,1)", "is for a search; type -m sweep.search=random sweep.trials=20"),
    ("optimizer=null", "the run needs an optimizer; type one of optimizer=adamw optimizer=muon"),
    ("sync_bn=true", "sync_bn=true is no option; type sync_bn=on"),
    ("sync_bn=False", "sync_bn=False is no option; type sync_bn=off"),
    ("trainer=foo", "trainer is a section, not a value; type trainer.<key>=foo"),
    ("trainer=[a,b]", "trainer is a section, not a value; type trainer.<key>=<value>"),
    ("trainer={epoch:3}", "trainer.epoch is no key of this config; type trainer.epochs=<value>"),
    ("trainer.epoch=3", "trainer.epoch is no key of this config; type trainer.epochs=3"),
    ("epochs=3", "epochs is no key of this config; type trainer.epochs=3"),
    ("nonsense=3", f"nonsense is no key of this config; {ALL_KEYS}"),
    ("hydra.nonsense=3", "hydra.nonsense is no key of this config; type python src/train.py --cfg hydra"),
    ("hydra.job.env_set={OMP_NUM_THREADS:1}", "type +hydra.job.env_set.OMP_NUM_THREADS=<value>"),
    ("hydra.mode=foo", "cannot be composed (Invalid value 'foo', expected one of [RUN, MULTIRUN]); type hydra.mode="),
    ("hydra.searchpath=[file:///nowhere]", "/nowhere in hydra.searchpath is no folder; type --config-dir=<a folder"),
    ("dataset.augment=null", "is a section, not a value; type dataset.augment.pad=0 dataset.augment.flip=false"),
    ("dataset.shape=null", "must be a list of 3 items, each a whole number of 1 or more; type the command without"),
    ("dataset.transforms=[{a:1}]", "names no class or function; type _target_:<module>.<class> in dataset.transforms["),
    ("dataset.prepare={}", "names no class or function; type ++dataset.prepare._target_=<module>.<class>"),
    ("task.loss={}", "task.loss={} names no class or function; type ++task.loss._target_=<module>.<class>"),
    ("+task.measures.x=3", "names no class or function; type ++task.measures.x._target_=<module>.<class>"),
    ("model._target_=", "model._target_ names no class; type model=<an option in conf/model>"),
    ("model._target_=a..Net", "=a..Net names no class; type model._target_=<module>.<class>, or model=<an option in"),
    ("launch=fork ~model.shape ~model.classes model._target_=torch.nn.Flatten", "no parameter to train; type model="),
    ("task.loss={_target_:torch.nn.functional.mse_loss}", "with (outputs, targets); type ++task.loss._partial_=true"),
    ("--package=trainer", "is a part of what --cfg prints; type --cfg job --package=trainer"),
    ("--cfg=job --package=trainr", "--package=trainr is no section; type --cfg job --package=trainer"),
    ("--cfg=job --package=run_dir", "--package=run_dir is a value, and no section; type --cfg job to see it"),
    ("+trainer.epochs=3", "trainer.epochs has a value already; type trainer.epochs=3"),
    ("+trainer.foo=3", f"trainer.foo is no key of this config; {ALL_KEYS}"),
    ("+dataset.augment.rotate=3", f"dataset.augment.rotate is no key of this config; {ALL_KEYS}"),
    ("dataset.prepare._target_=a.b", "type +dataset.prepare._target_=a.b"),
    ("device=cuda", "device is no key of this config; type backend=nccl"),
    ("trainer.device=cuda:0", "trainer.device is no key of this config; type backend=nccl"),
    ("device=cpu", "device is no key of this config; type backend=gloo"),
    ("gpus=2", "gpus is no key of this config; type launch=torchrun launch.nproc_per_node=2"),
    ("trainer.lr=3", "trainer.lr is no key of this config; type optimizer.lr=3"),
    ("launch.nproc_per_node=2", f"{OPTIONS_OF_NPROC}; type launch=fork launch.nproc_per_node=2"),
    ("launch.nproc_per_node=-1", f"{OPTIONS_OF_NPROC} and must be a whole number of 1 or more, auto, gpu or cpu; type"),
    (
        "logger=[console] logger.tensorboard.graph=true",
        "is a key of logger=tensorboard; type logger=[console,tensorboard] logger.tensorboard.graph=true",
    ),
    ("model.name=resnet50", "model.name is a key of model=resnet18 and timm; type model=resnet18 model.name=resnet50"),
    ("launch=fork launch.ranks=2", "launch.ranks is no key of this config; type launch.nproc_per_node=2"),
    ("launch=fork launch.procs=2", "launch.procs is no key of this config; type launch.nproc_per_node=2"),
    ("launch.world_size=2", "is no key of this config; type launch=torchrun launch.nproc_per_node=2"),
    ("model._target_=my.Net model.width=3", "model.width is no key of this config; type +model.width=3 if your class"),
    ("--config-dir=nowhere seed=1", "--config-dir=nowhere is no folder; type --config-dir=<a folder of configs>"),
    ("--config-path=nowhere", "--config-path=nowhere is no folder; type --config-path=<a folder of configs>"),
    ("model.dropout=2", "and must be a number from 0 to less than 1; type model=mlp model.dropout=0"),
    ("~trainer.ema", "trainer.ema cannot be removed; type trainer.ema=null"),
    ("~trainer.epochs", "trainer.epochs cannot be removed; type trainer.epochs=5"),
    ("~dataset.workers", "dataset.workers cannot be removed; type dataset.workers=0"),
    ("~trainer", "the run needs the section trainer; type trainer.<key>=<value> to change a value of it"),
    ("~scheduler", "scheduler._target_ names no class; type scheduler=<an option in conf/scheduler>"),
    ("~logger", "the list of loggers cannot be removed; type logger=[]"),
    ("~nothing", f"there is no nothing to remove; {ALL_KEYS}"),
    ("trainer.epochs", "trainer.epochs has no value; type trainer.epochs=<value>"),
    ("trainer.epochs={", "trainer.epochs={ cannot be read (no viable alternative at input '{'); type trainer."),
    ("optimizer.lr=${foo}", "optimizer.lr has no usable value (Interpolation key 'foo' not found); type optimizer.lr="),
    ("hydra/sweeper=nevergrad", "needs a plugin of Hydra; type pip install hydra-nevergrad-sweeper"),
    ("--experimental-rerun=x", "needs a pickled config, which these runs do not write; type hydra.run.dir=<the run's"),
]
# Suggestions are in the section that was typed, and are accepted when they are typed.
ANSWERS += [
    ("trainer.warmup_steps=100", f"trainer.warmup_steps is no key of this config; {ALL_KEYS}"),
    ("trainer.max_epochs=3", "trainer.max_epochs is no key of this config; type trainer.epochs=3"),
    ("trainer.epoch=x", f"trainer.epoch is no key of this config; {ALL_KEYS}"),
    ("optimizer.name=adam", "optimizer.name is no key of this config; type optimizer=adamw"),
    ("optimizer.lrr=1", "optimizer.lrr is no key of this config; type optimizer.lr=1"),
    ("optimizer.momentun=0.8", "optimizer.momentun is no key of this config; type optimizer.momentum=0.8"),
    ("task.label_weights=[1,5]", f"task.label_weights is no key of this config; {ALL_KEYS}"),
    ("scheduler.step_size=3", f"scheduler.step_size is no key of this config; {ALL_KEYS}"),
    ("mode.output=x", f"mode.output is no key of this config; {ALL_KEYS}"),
    ("model=mlp model.hidden=64", f"model.hidden is no key of this config; {ALL_KEYS}"),
    ("trainer.precision=16", "type trainer.precision=bf16 or trainer.precision=fp16"),
    ("trainer.precision=16-mixed", "type trainer.precision=bf16 or trainer.precision=fp16"),
    ("trainer.precision=float32", "must be fp32, bf16, fp16, fp64 or bf16-true; type trainer.precision=fp32"),
    ("trainer.epochs=1e2", "trainer.epochs=100.0 must be a whole number of 1 or more; type trainer.epochs=100"),
    ("trainer.max_grad_norm=None", "must be a number above 0, or null; type trainer.max_grad_norm=null"),
    ("trainer.deterministic=yes", "must be true or false; type trainer.deterministic=true"),
    ("optimizer=adam", "optimizer=adam is no option; type optimizer=adamw"),
    ("scheduler.warmup_steps=100", f"scheduler.warmup_steps is no key of this config; {ALL_KEYS}"),
    ("dataset.name=cifar10", "dataset.name is no key of this config; type dataset=cifar10"),
    ("freeze=net", "freeze=net must be a list of names; type freeze=[net]"),
    ("~trainer.epoch", f"there is no trainer.epoch to remove; {ALL_KEYS}"),
    ("++model.foo=3", "convnet takes no foo; leave model.foo out, or type model=<an option in conf/model>"),
]
# Words as other programs take them, and words with too much in them.
ANSWERS += [
    ("--optimizer.lr=0.1", "--optimizer.lr=0.1 is no flag; type optimizer.lr=0.1"),
    ("--lr=0.1", "--lr=0.1 is no flag; type optimizer.lr=0.1"),
    ("--batch-size=32", "--batch-size=32 is no flag; type trainer.batch_size=32"),
    ("--gpus=2", "--gpus=2 is no flag; type launch=torchrun launch.nproc_per_node=2"),
    ("--optimizer=Adam", "--optimizer=Adam is no flag; type optimizer=adamw"),
    ("--verbose", "--verbose is no flag; type python src/train.py --hydra-help to see the flags"),
    ("trainer..epochs=3", "cannot be read (. must be in quotes); type trainer.epochs=3"),
    ("trainer:epochs=3", "type trainer.epochs=3"),
    ("“optimizer.lr=0.1”", "type optimizer.lr=0.1"),
    ("optimizer.lr=“0.1”", "type optimizer.lr=0.1"),
    ("optimizer.lr=\u00a00.1", "type optimizer.lr=0.1"),
]
TAKEN_APART = [
    ("optimizer.lr = 0.1", "= has no key; type optimizer.lr=0.1"),
    ("optimizer.lr= 0.1", "optimizer.lr= 0.1 has a space; type optimizer.lr=0.1"),
    ("optimizer.lr =0.1", "=0.1 has no key; type optimizer.lr=0.1"),
    ("trainer.epochs 3", "trainer.epochs has no value; type trainer.epochs=3"),
    ("epochs 3", "epochs is no key of this config; type trainer.epochs=3"),
    ("--trainer.epochs 3", "--trainer.epochs is no flag; type trainer.epochs=3"),
    ("--optimizer adam --lr 0.1", "--optimizer is no flag; type optimizer=adamw"),
]
# Advice that needs a GPU, torchvision (which takes seconds to import), the user's own class or the word refused.
NOT_TRIED = ("nccl", "resnet", "if your class", "one of", "_partial_", "=a.b")


@pytest.mark.parametrize(("typed", "said"), ANSWERS, ids=[typed for typed, _ in ANSWERS])
def test_an_unknown_word_is_answered_with_what_was_meant(typed: str, said: str) -> None:
    words = typed.split() if "=" in typed.partition(" ")[2] else [typed]
    sentence = answer(*words)
    assert sentence is not None
    assert said in sentence
    if not any(word in said for word in NOT_TRIED):
        assert_advice_helps(words[:-1], sentence)


@pytest.mark.parametrize(("typed", "said"), TAKEN_APART, ids=[typed for typed, _ in TAKEN_APART])
def test_words_that_a_space_takes_apart_are_put_together(typed: str, said: str) -> None:
    assert answer(*typed.split(" ")) == said
    assert_advice_helps([], said)


def test_preset_with_a_plus_and_flags_between_the_overrides_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my conf").mkdir()
    assert answer("+experiment=toy_regression") is None
    typed = ["train.py", "seed=1", "-m", "++experiment=mnist_ddp", "--local-rank=0", "-cd", "my conf", "seed=2"]
    hydra_reads = ["train.py", "seed=1", "experiment=mnist_ddp", "seed=2", "-m", "-cd", "my conf"]
    assert prepare_arguments(typed) == hydra_reads
    assert prepare_arguments(["train.py", "-i", "defaults", "seed=1"]) == ["train.py", "seed=1", "-i", "defaults"]


def test_flags_that_exclude_each_other_are_refused() -> None:
    assert answer("-m", "seed=1,2", "--cfg", "job") == (
        "--multirun and --cfg exclude each other; type the command with one of them"
    )


class Direction(enum.Enum):
    minimize = 1
    maximize = 2


@dataclass
class SweeperLikeOptunas:
    _target_: str = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
    direction: Direction = Direction.minimize


def test_the_objective_gives_optuna_its_direction() -> None:
    ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=SweeperLikeOptunas)

    def directions(*typed: str) -> list[str]:
        words = refuse_sampling_sweep(["train.py", "-m", "hydra/sweeper=optuna", *typed], RankInfo())
        return [word.partition("=")[2] for word in words if word.startswith("hydra.sweeper.direction=")]

    assert directions() == ["maximize"]
    assert directions("objective=test/loss") == ["minimize"]
    assert directions("task.monitor=loss") == ["minimize"]
    assert directions("dataset=random") == ["minimize"]
    assert directions("hydra.sweeper.direction=minimize") == ["minimize"]


def test_a_sampling_sweeper_is_refused_where_every_rank_would_draw_its_own_values() -> None:
    command = ["train.py", "-m", "hydra/sweeper=optuna", "optimizer.lr=interval(0.01,0.1)"]
    with pytest.raises(ConfigError, match="type python src/train.py -m launch=torchrun hydra/sweeper=optuna"):
        refuse_sampling_sweep(command, RankInfo(rank=1, world_size=2, started_by="torchrun"))
    grid = ["train.py", "-m", "optimizer.lr=0.1,0.01"]
    assert refuse_sampling_sweep(grid, RankInfo(world_size=2, started_by="torchrun")) == grid
