"""The net of src/mine.py by itself, and in the first steps of a training on one rank, on two, and resumed."""

import torch
from mine import Net

import lockstep


def test_there_is_a_score_for_each_class() -> None:
    net = Net(shape=[1, 8, 8], classes=10, width=4)
    assert net(torch.zeros(5, 1, 8, 8)).shape == (5, 10)


def test_the_promises_hold() -> None:
    assert lockstep.check(["model=mine"])
