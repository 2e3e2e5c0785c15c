"""Words that once ended in a traceback, found by tests/drills/test_fuzz.py: each is answered with one sentence."""

import pytest

from lockstep.errors import ConfigError
from support.refusals import answer, assert_advice_helps

HUGE = "9" * 400
STRATEGY = "lockstep.strategies.base.Strategy"
ANSWERS = [
    # Hydra's own errors of any type
    ("gradient_sync=[[]]", "gradient_sync=[[]] cannot be composed ("),
    ("logger=[nan]", "logger=[nan] cannot be composed (argument of type 'float' is not iterable); type logger="),
    ("dataset=[{a:1}]", "dataset=[{a:1}] cannot be composed"),
    ("backend=${oc.select:nope}", "backend=${oc.select:nope} cannot be composed ("),
    # numbers that no float holds
    (f"trainer.ema={HUGE}", "must be a number between 0 and 1, both excluded, or null; type trainer.ema=0.999"),
    (f"optimizer.lr={HUGE}", "must be a number above 0; type optimizer.lr=0.05"),
    (f"trainer.epochs={HUGE}", "must be a whole number of 1 or more; type trainer.epochs=5"),
    ("trainer.epochs=18446744073709551616", "must be a whole number of 1 or more; type trainer.epochs=5"),
    # values where a node with a class belongs
    ("dataset.train=@", "dataset.train=@ reads no data; type dataset=<an option in conf/dataset>"),
    ("launch={_target_:1}", "launch._target_ names no class; type launch=<an option in conf/launch>"),
    ("~strategy._target_", "strategy._target_ names no class; type strategy=<an option in conf/strategy>"),
    ("logger.console=1e-320", "logger.console=1e-320 is no logger; type logger=[]"),
    ("strategy._target_=torch.nn.Identity", f"gives an object of Identity, and {STRATEGY} is wanted; type strategy=<"),
    ("launch._target_=torch.nn.Identity", "and lockstep.launchers.base.Launcher is wanted"),
    # contradictions
    ("model.classes=1", "model.classes=1 is less than dataset.classes=10; type model.classes=10"),
    ("model.shape=[3,8,8]", "model.shape=[3,8,8] does not fit dataset.shape=[1,8,8]; type model.shape=[1,8,8]"),
    # paths and flags
    (f"resume={'a' * 300}", "does not exist; to start afresh leave resume= out"),
    ("--nothing", "--nothing is no flag; type python src/train.py --hydra-help to see the flags"),
    ("--cfg", "argument --cfg/-c: expected one argument; type python src/train.py --hydra-help to see the flags"),
]
NOT_PRINTABLE = ["trainer.epochs=a\nb", "gradient_sync=\r", "model=a\x1eb", "data_dir\n=x", "x=\udcff", "seed=\u202e"]


@pytest.mark.parametrize(("typed", "said"), ANSWERS, ids=[typed[:40] for typed, _ in ANSWERS])
def test_words_that_once_ended_in_a_traceback_are_answered(typed: str, said: str) -> None:
    sentence = answer(typed)
    assert sentence is not None
    assert said in sentence
    assert_advice_helps([], sentence)


@pytest.mark.parametrize("typed", NOT_PRINTABLE, ids=ascii)
def test_a_sentence_is_one_line_of_printable_characters(typed: str) -> None:
    sentence = answer(typed)
    assert sentence is not None
    assert sentence.isprintable()
    assert " type " in sentence


def test_a_sentence_that_travels_between_processes_stays_one_line() -> None:
    assert str(ConfigError("a\nb\ttab é 日本")) == r"a\nb\ttab é 日本"
