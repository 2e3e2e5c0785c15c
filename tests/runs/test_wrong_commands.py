"""Sixty wrong commands. Each ends at once with one sentence that names the mistake and says what to type, and the
command with what it says is right, or goes wrong elsewhere."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import PYTHON_TRAIN, Command
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
    "experiment/no_package": "trainer:\n  epochs: 2\n",
    "experiment/no_override": "# @package _global_\ndefaults:\n  - /model: mlp\n",
    "experiment/typo": "# @package _global_\ntrainer:\n  epoch: 2\n",
    "experiment/tab": "# @package _global_\ntrainer:\n\tepochs: 2\n",
    "experiment/twice": "# @package _global_\nseed: 1\nseed: 2\n",
    "experiment/no_option": "# @package _global_\ndefaults:\n  - override /model: nlp\n",
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
 | trainer=3 | trainer
model=mlp | model.widht=8 | model.widht
 | model.width=8 | model.width
 | trainer.epochs=ten | trainer.epochs
 | trainer.epochs=0 | trainer.epochs
 | trainer.epochs=2.5 | trainer.epochs
 | trainer.epochs="'3'" | trainer.epochs
 | trainer.epochs=[3] | trainer.epochs
 | trainer.precision=16 | trainer.precision
 | trainer.precision=float32 | trainer.precision
 | trainer.deterministic=yes | trainer.deterministic
 | trainer.max_grad_norm=none | trainer.max_grad_norm
 | optimizer.lr=-1 | -1
 | optimizer.lr=high | optimizer.lr
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
 | optimizer.lr = 0.1 | =
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
 | --config-dir=conf experiment=no_package | trainer
 | --config-dir=conf experiment=no_override | model
 | --config-dir=conf experiment=typo | trainer.epoch
 | --config-dir=conf experiment=tab | tab.yaml
 | --config-dir=conf experiment=twice | twice.yaml
 | --config-dir=conf experiment=no_option | nlp
 | monitor=test/accuracy | monitor
 | monitor=val/f1 | f1
dataset.validation=null | evaluation.patience=3 | evaluation.patience
 | dataset.folds=5 | dataset.folds
 | dataset.validation=1.5 | dataset.validation
 | task._target_=torch.nn.Identity | task
model=mlp | model.dropout=2 | model.dropout
 | scheduler=torch | scheduler.schedule
"""
ROWS = [[part.strip() for part in row.split(" | ")] for row in TABLE.strip("\n").splitlines()]


def advice_in(sentence: str) -> list[str] | None:
    """The words of what a sentence says to type: the first of several. None if something is left to be filled in."""
    text = re.split(r", or |, for | for all |, with ", sentence.rpartition("; type ")[2])[0]
    return None if "<" in text else shlex.split(text)


def key_of(word: str) -> str:
    return re.split("[=:]", word.lstrip("+~"))[0]


def corrected(kept: list[str], wrong: list[str], sentence: str, advice: list[str]) -> list[str]:
    """The command with what the sentence says. A wrong word stays if something else is named and to be added."""
    typed = {key_of(word) for word in advice if not word.startswith("~")}
    replaced = {*typed, sentence.removeprefix("lockstep: ").split("=")[0].split(" ")[0].lstrip("+~")}
    words = [word for word in [*kept, *wrong] if key_of(word) not in replaced and word not in advice]
    return [*([word for word in words if "=" in word[1:] or word.startswith("~")]), *advice]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "own_net.py").write_text(OWN)
    for name, text in CONFIGS.items():
        path = folder / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_what_a_refusal_says_to_type_is_right(
    start: Callable[..., Command], project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.chdir(project)
    before = sorted(project.rglob("*"))
    table, faults, helped = [], [], 0
    for kept, wrong, named in ROWS:
        words = [*shlex.split(kept), *shlex.split(wrong)]
        command = start(*PYTHON_TRAIN, *words, cwd=project, PYTHONPATH=project).finish(None)
        sentences = [line for line in command.output.splitlines() if line.startswith("lockstep: ")]
        sentence = sentences[0] if len(sentences) == 1 else f"{len(sentences)} sentences\n{command.output[-2000:]}"
        rest = [line for line in command.output.splitlines() if line != sentence and not line.startswith("    ")]
        if command.process.returncode != 2 or rest or named not in sentence or "; type " not in sentence:
            faults.append(f"{wrong}: exit {command.process.returncode}, {sentence}\n" + "\n".join(rest))
            continue
        advice, end = advice_in(sentence), "to fill in"
        if advice is not None:
            advice = corrected(shlex.split(kept), shlex.split(wrong), sentence, advice)
            second = answer(*advice)
            same = (
                second is not None and second.partition(";")[0] == sentence.removeprefix("lockstep: ").partition(";")[0]
            )
            end = "right" if second is None else f"{'the same' if same else 'another'}: {second}"
            helped += not same
        table.append(f"{' '.join(words)}\n    {sentence}\n    typed: {' '.join(advice or [])}\n    {end}")
    with capsys.disabled():
        print("\n", *table, f"{helped} of {len(ROWS)} helped", sep="\n")
    assert not faults, "\n\n".join(faults)
    assert sorted(path for path in project.rglob("*") if "__pycache__" not in str(path)) == before
    assert helped >= 50
