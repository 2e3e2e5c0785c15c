"""Nodes: what a `_target_` names, the arguments that it takes, and the object that it makes."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.config.check import instantiate, instantiate_as
from lockstep.errors import ConfigError
from lockstep.models.base import has_lazy_layers
from lockstep.tasks.base import Task
from support.configs import composed
from support.refusals import accepted, answer


class Net(nn.Module):
    def __init__(self, shape: list[int], classes: int, width: int, depth: int = 2) -> None:
        super().__init__()
        if width > 99:
            raise ValueError("too wide")
        self.width, self.depth = width, depth


NET = "model._target_=test_nodes.Net"
WRONG = {
    NET: "test_nodes.Net needs width; type +model.width=<value>",
    f"{NET} +model.width=3 +model.x=1 +model.y=2": "takes no x or y, but depth; type ~model.x ~model.y",
    "optimizer._target_=torch.optim.Adm": "; type optimizer._target_=torch.optim.Adam",
    "+optimizer.learning_rate=1": "torch.optim.SGD takes no learning_rate, but ",
    "scheduler._target_=torch.optim.lr_scheduler.StepLR": "StepLR needs step_size; type +scheduler.step_size=<value>",
    "loader.transforms=[{_target_:torchvision.transforms.v2.Nope}]": "loader.transforms[0]._target_=",
    "+dataset.nois=3": "lockstep.data.vision.Digits takes no nois; type ~dataset.nois",
    "task.loss={_target_:torch.nn.HuberLoss,dleta:3}": "takes no dleta, but ",
}


@pytest.mark.parametrize("typed", WRONG)
def test_a_node_that_does_not_fit_is_refused(typed: str) -> None:
    assert WRONG[typed] in str(answer(*typed.split()))


@pytest.mark.parametrize(
    ("module", "reason", "advice"),
    [
        (
            "import nothere_at_all",
            "No module named 'nothere_at_all'",
            "PYTHONPATH=<the folder of nothere_at_all.py> before the command, or pip install nothere_at_all",
        ),
        ("1 / 0", "ZeroDivisionError: division by zero", "model._target_=<module>.<class>"),
        ("def", "SyntaxError: invalid syntax", "model._target_=<module>.<class>"),
    ],
)
def test_an_error_of_the_import_is_in_the_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, reason: str, advice: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"broken_{abs(hash(module))}"
    (tmp_path / f"{name}.py").write_text(f"{module}\n")
    said = str(answer(f"model._target_={name}.Net"))
    assert reason in said
    assert said.endswith(f"; type {advice}")


def test_partial_need_not_be_typed() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    typed = ["optimizer._target_=torch.optim.RMSprop", "scheduler=torch"]
    typed.append("scheduler.schedule={_target_:torch.optim.lr_scheduler.StepLR,step_size:3}")
    typed.append("loader.collate_fn={_target_:torch.utils.data.default_collate}")
    config = accepted(*typed)
    optimizer = instantiate(config.optimizer, [parameter])
    assert isinstance(optimizer, torch.optim.RMSprop)
    assert isinstance(
        instantiate(config.scheduler["schedule"] | {"_partial_": True})(optimizer), torch.optim.lr_scheduler.StepLR
    )
    assert config.loader.collate_fn is not None
    assert torch.equal(instantiate(config.loader.collate_fn)([torch.ones(1)] * 2), torch.ones(2, 1))


def test_what_a_constructor_raises_is_what_is_raised() -> None:
    node = {"_target_": "test_nodes.Net", "shape": [1], "classes": 2}
    with pytest.raises(ValueError, match=r"^too wide$"):
        instantiate(node | {"width": 100})
    with pytest.raises(ValueError, match=r"^too wide$"):
        instantiate(node, width=100)
    with pytest.raises(
        ConfigError,
        match=r"gives an object of Net, and lockstep.tasks.base.Task is wanted; type task\._target_=",
    ):
        instantiate_as(Task, node | {"width": 1}, "task")
    assert instantiate(None) is None
    assert [made.depth for made in instantiate([node | {"width": 1, "depth": 3}] * 2)] == [3, 3]
    assert instantiate_as(nn.Module, node, "model", width=2, other=3).width == 2  # what is not taken is not passed


def test_values_of_other_classes_are_passed_as_they_are() -> None:
    assert accepted(NET, "+model.width=wide").model["width"] == "wide"
    assert has_lazy_layers(instantiate(composed("model._target_=torch.nn.LazyLinear", "+model.out_features=2").model))
