"""Seventy wrong commands. A sentence names each mistake and says what to type, and the command with what it says is
right, or goes wrong elsewhere. Whole commands with such mistakes are in test_hydra_versions.py."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.refusals import answer

OWN = """
from torch import nn

LIMIT = 3


class Net(nn.Module):
    def __init__(self, width, shape, classes, depth=2):
        super().__init__()
        if width > 1000:
            raise ValueError("width is at most 1000")
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, classes))

    def forward(self, inputs):
        return self.net(inputs)
"""
CONFIGS = {  # below the folder of --config-dir
    "model/own": "_target_: own_net.Net\nwidht: 4\nshape: ${dataset.shape}\nclasses: ${dataset.classes}\n",
    "model/nothing": "_target_: own_net.Net\nwidth: ${nothing}\nshape: ${dataset.shape}\nclasses: ${dataset.classes}\n",
    "model/missing": "_target_: own_net.Net\nwidth: ???\nshape: ${dataset.shape}\nclasses: ${dataset.classes}\n",
}
NET = "model._target_=own_net.Net"

# What is right | the mistake | what the sentence names. In what is right stands what the mistake needs.
TABLE = """
 | trainer.epoch=3 | trainer.epoch
 | epochs=3 | epochs
 | lr=0.1 | lr
 | optimzer.lr=0.1 | optimzer.lr
 | optimizer.learning_rate=0.1 | optimizer.learning_rate
 | trainer.lr=0.1 | trainer.lr
 | +trainer.epoch=3 | trainer.epoch
 | +modle=mlp | modle
 | ++trainer.epohcs=3 | trainer.epohcs
 | +trainer.epochs=3 | trainer.epochs
 | ~trainer.epoch | trainer.epoch
 | ~trainer.epochs | trainer.epochs
 | dataset.batch_size=32 | dataset.batch_size
 | modle=mlp | modle
 | Trainer.epochs=3 | Trainer.epochs
 | model=convnett | convnett
 | dataset=Digits | Digits
 | optimizer=adam | adam
 | strategy=DDP | DDP
 | sync_bn=true | sync_bn
 | logger=[tensorbord] | tensorbord
 | experiment=mnist | mnist
 | model=[mlp,linear] | model
 | optimizer=null | optimizer
 | ~optimizer | optimizer
 | +model=mlp | model
 | trainer=3 | trainer
model=mlp | model.widht=8 | model.widht
 | model.width=8 | model.width
 | launch.nproc_per_node=2 | launch.nproc_per_node
 | trainer.epochs=ten | trainer.epochs
 | trainer.epochs=2.5 | trainer.epochs
 | trainer.epochs="'3'" | trainer.epochs
 | trainer.epochs=[3] | trainer.epochs
 | trainer.precision=16 | trainer.precision
 | trainer.precision=float32 | trainer.precision
 | trainer.deterministic=yes | trainer.deterministic
 | trainer.max_grad_norm=none | trainer.max_grad_norm
 | optimizer.lr=-1 | -1
 | optimizer.lr=10% | optimizer.lr
 | snapshot.every=10 | snapshot.every
 | parameters.freeze=net | parameters.freeze
 | dataset.std=[0] | dataset.std
 | trainer.epochs=[3 | trainer.epochs
 | optimizer.lr=(0.1 | optimizer.lr
 | resume="'runs/a" | resume
 | data_dir=a=b | data_dir
 | trainer.epochs | trainer.epochs
 | trainer.epochs 3 | trainer.epochs
 | trainer.epochs:3 | trainer.epochs
 | optimizer.lr = 0.1 | optimizer.lr
 | optimizer.lr= 0.1 | 0.1
 | optimizer.lr =0.1 | optimizer.lr
 | optimizer.lr=0.1,0.01 | optimizer.lr
 | model=mlp,linear | model
 | seed=??? | seed
 | seed=${nothing} | seed
 | model._target_=no_module.Net | no_module.Net
 | model._target_=own_net.Nett | own_net.Nett
 | model._target_=own_net.LIMIT | own_net.LIMIT
 | model._target_=Net | Net
 | model._target_=own_net.Net | width
model._target_=own_net.Net | +model.widht=4 | widht
 | --config-dir=conf model=own | widht
 | --config-dir=conf model=nothing | model.width
 | --config-dir=conf model=missing | model.width
model=mlp | model.dropout=2 | model.dropout
 | scheduler=torch | scheduler.schedule
"""
FILLED_IN = {"scheduler.schedule": "'{_target_:torch.optim.lr_scheduler.StepLR,step_size:3}'"}
ROWS = [[part.strip() for part in row.split(" | ")] for row in TABLE.strip("\n").splitlines()]


def advice_in(sentence: str) -> list[str] | None:
    """The words of what a sentence says to type: the first of several. None if more than a value is left to fill in."""
    text = re.split(r",? or |, for | for |, with ", sentence.rpartition("; type ")[2])[0].replace(
        "<value>", FILLED_IN.get(sentence.split()[1], "1")
    )
    return None if "<" in text else shlex.split(text)


def key_of(word: str) -> str:
    return re.split("[=:]", word.lstrip("+~"))[0]


def corrections(words: list[str], wrong: list[str], advice: list[str]) -> Iterator[list[str]]:
    """The command with the advice: added, where it replaces words of the same key; or in the place of the mistake."""
    if advice[:3] == ["the", "command", "without"]:
        yield [word for word in words if word != advice[3]]
        return
    typed = {key_of(word) for word in advice if not word.startswith("~")}
    yield [*(word for word in words if key_of(word) not in typed), *advice]
    yield [*(word for word in words if key_of(word) not in typed and word not in wrong), *advice]


@pytest.mark.timeout(600)
def test_what_a_refusal_says_to_type_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in CONFIGS.items():
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own_net.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ends = {}
    for kept, wrong, named in ROWS:
        mistake = shlex.split(wrong)
        words = [*shlex.split(kept), *mistake]
        said = str(answer(*words)).partition("\n")[0]
        assert named in said and "; type " in said, (words, said)  # noqa: PT018
        advice, ends[wrong] = advice_in(said), "something is to be filled in"
        for tried in [] if advice is None else corrections(words, mistake, advice):
            second = str(answer(*tried)).partition("\n")[0]
            ends[wrong] = second if second.partition(";")[0] != said.partition(";")[0] else "the same"
            if second == "None":
                break
    print(*ends.items(), sep="\n")
    assert sum(end not in ("the same", "something is to be filled in") for end in ends.values()) >= len(ROWS) - 10
