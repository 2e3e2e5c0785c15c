"""Wrong commands. A sentence names each mistake and says what to type, and the command with what it says is
right, or goes wrong elsewhere. Whole commands with such mistakes are in test_hydra_versions.py."""

import re
import shlex

import pytest

from support.refusals import answer

OWN = """
from torch import nn

from lockstep.training.callbacks import Callback

LIMIT = 3


class Norms(Callback):
    def on_batch_end(self, run):
        pass


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
}

# What is right, and what the mistake needs | the mistake | what the sentence says, or else the key of the mistake |
# what it says to type, where that is right at once.
TABLE = """
 | trainer.epoch=3 | trainer.epoch
 | epochs=3 | epochs
 | optimzer.lr=0.1 | optimzer.lr
 | +trainer.epoch=3 | trainer.epoch
 | +modle=mlp | modle
 | +trainer.epochs=3 | trainer.epochs
 | ~trainer.epoch | trainer.epoch
 | modle=mlp | modle
 | model=convnett | convnett
 | sync_bn=true | sync_bn
 | logger=[tensorbord] | tensorbord
 | model=[mlp,linear] | model
 | ~optimizer | optimizer
 | trainer=3 | trainer
model=mlp | model.widht=8 | model.widht
 | model.width=8 | model.width
 | launch.nproc_per_node=2 | launch.nproc_per_node
 | trainer.epochs="'3'" | trainer.epochs
 | trainer.precision=16 | trainer.precision
 | optimizer.lr=-1 | -1
 | dataset.std=[0] | dataset.std
 | trainer.epochs=[3 | trainer.epochs
 | data_dir=a=b | data_dir
 | trainer.epochs 3 | trainer.epochs
 | optimizer.lr = 0.1 | optimizer.lr
 | optimizer.lr=0.1,0.01 | optimizer.lr
 | seed=??? | seed
 | seed=${nothing} | seed
 | model._target_=no_module.Net | no_module.Net
 | model._target_=own_net.Nett | own_net.Nett
 | model._target_=own_net.LIMIT | it is neither a class nor a function
model._target_=own_net.Net | +model.widht=4 | widht
 | --config-dir=conf model=own | widht
 | --config-dir=conf model=nothing | model.width
model=mlp | model.dropout=2 | model.dropout
 | callbacks=[{_target_: own_net.Net}] | callbacks=[{_target_: cannot be composed | callbacks=<value>
 | scheduler=torch | scheduler.schedule
 | seed=abc | a valid integer | seed=<value>
 | optimizer.lr=1.2.3% | a valid number | optimizer.lr=<value>
 | trainer.max_time=0s | a time such as 90s, 30min or 2h | trainer.max_time=null
 | trainer.compile=fast | a valid boolean or 'reduce-overhead' or 'max-autotune' | trainer.compile=reduce-overhead
 | trainer.ema=1 | an object | trainer.ema=null
 | trainer.checkpoint_activations=block | a valid array | trainer.checkpoint_activations=[block]
 | evaluation.test=always | 'end', 'every' or 'never' | evaluation.test=end
 | backend.timeout=0.5 | greater than or equal to 1 | backend.timeout=<value>
optimizer=adamw | optimizer.betas=0.9 | a valid array | optimizer.betas=<value>
launch=fork | launch.nproc_per_node=some | a valid integer or 'auto', 'gpu' or 'cpu' | launch.nproc_per_node=auto
 | loader.validation=1.5 | less than 1 | loader.validation=null
 | loader.folds=5 |  | loader.fold=0
loader.folds=5 | loader.fold=5 |  | loader.fold=0
 | loader.fold=1 |  | loader.folds=5
loader.validation=null | trainer.final=train+val |  | trainer.final=null
 | monitor=test/accuracy |  | monitor=val/accuracy
loader.validation=null | monitor=val/loss |  | loader.validation=0.1
monitor=val/loss | trainer.final=train+val |  | trainer.final=null
monitor=null | scheduler=plateau |  | scheduler=cosine
trainer.precision=fp16 | watch.nan=skip |  | watch.nan=stop
 | parameters.groups=[{lr:0.1}] |  | parameters.groups=[{match:fc,lr:0.1}]
trainer.gradient_accumulation_steps=2 | trainer.compile=reduce-overhead |  | trainer.compile=true
 | model._target_=own_net.Net | own_net.Net needs width; type ++model.width=<value>
model._target_=own_net.Net +model.width=3 +model.x=1 | +model.y=2 | takes no x or y, but depth; type ~model.x ~model.y
 | ~optimizer._target_ | optimizer has no _target_, its class; type +optimizer._target_=<module>.<class>
 | optimizer._target_=Adam | No module named 'Adam'); type optimizer._target_=<module>.<class>
 | optimizer._target_=torch.optim.Adm | ; type optimizer._target_=torch.optim.Adam
 | +optimizer.learning_rate=1 | torch.optim.SGD takes no learning_rate, but
optimizer=adamw | optimizer.betas=[0.9,1.5] | (Invalid beta parameter at index 1: 1.5); type optimizer=sgd
 | scheduler._target_=torch.optim.lr_scheduler.StepLR | StepLR needs step_size; type ++scheduler.step_size=<value>
 | loader.transforms=[{_target_:torchvision.transforms.v2.Nope}] | loader.transforms[0]._target_=
 | task.loss={_target_:torch.nn.HuberLoss,dleta:3} | takes no dleta, but
 | callbacks=[{_target_:own_net.Net,width:3}] | needs shape and classes; type callbacks='[{_target_:own_net.Net,
 | callbacks=[{_target_:own_net.Norms}] | own_net.Norms.on_batch_end is never called; type in its place <on_step_end
launch=spawn | launch.start_method=thread | 'fork' or 'spawn'
launch=torchrun | launch.nproc_per_node=0 | launch.nproc_per_node=0 should be
mode=find_lr | mode.max_lr=1e-7 | is below min_lr; type mode.max_lr=0.001
mode=find_lr | mode.steps=5 | should be greater than or equal to 40
 | snapshot.mirror=s3://bucket/run | should be an object | snapshot.mirror=null
"""
FILLED_IN = {"scheduler.schedule": "'{_target_:torch.optim.lr_scheduler.StepLR,step_size:3}'"}
ROWS = [[part.strip() for part in [*row.split(" | "), ""][:4]] for row in TABLE.strip("\n").splitlines()]


def advice_in(sentence):
    """The words of what a sentence says to type: the first of several. None if more than a value is left to fill in."""
    text = re.split(r",? or |, for | for |, with ", sentence.rpartition("; type ")[2])[0].replace(
        "<value>", FILLED_IN.get(sentence.split()[1], "1")
    )
    return None if "<" in text else shlex.split(text)


def key_of(word):
    return re.split("[=:]", word.lstrip("+~"))[0]


def corrections(words, wrong, advice):
    """The command with the advice: added, where it replaces words of the same key; or in the place of the mistake."""
    if advice[:3] == ["the", "command", "without"]:
        yield [word for word in words if word != advice[3]]
        return
    typed = {key_of(word) for word in advice if not word.startswith("~")}
    yield [*(word for word in words if key_of(word) not in typed), *advice]
    yield [*(word for word in words if key_of(word) not in typed and word not in wrong), *advice]


@pytest.mark.timeout(600)
def test_what_a_refusal_says_to_type_is_right(tmp_path, monkeypatch):
    for name, text in CONFIGS.items():
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own_net.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ends = []
    for kept, wrong, named, to_type in ROWS:
        mistake = shlex.split(wrong)
        words = [*shlex.split(kept), *mistake]
        said = str(answer(*words)).partition("\n")[0]
        assert (named or key_of(wrong)) in said, (words, said)
        assert f"; type {to_type}" in said.replace("'", ""), (words, said)
        advice, end = advice_in(said), "something is to be filled in"
        for tried in [] if advice is None else corrections(words, mistake, advice):
            second = str(answer(*tried)).partition("\n")[0]
            end = second if second.partition(";")[0] != said.partition(";")[0] else "the same"
            if second == "None":
                break
        assert not to_type or "<" in to_type or end == "None", (words, said, end)
        ends.append(end)
        print(f"{' '.join(words)}\n    {said}\n    {end}")
    assert sum(end not in ("the same", "something is to be filled in") for end in ends) >= len(ROWS) - 15


def test_what_needs_more_than_another_word_is_refused():
    several = "several nodes need launch=spawn, and launch.max_restarts=0: torchrun"
    for typed, said in (
        ("launch=spawn launch.nnodes=2 launch.start_method=fork", several),
        ("launch=spawn launch.nnodes=2 launch.max_restarts=3", several),
        ("launch=spawn launch.nnodes=2 launch.node_rank=2", "does not fit launch.nnodes=2; type launch.node_rank=0 to"),
        (
            "mode=find_lr resume=outputs/a",
            "leave resume=outputs/a out, or type parameters.init=<a run> for its weights",
        ),
        ("mode=check resume=outputs/a", "leave resume=outputs/a out, or type parameters.init=<a run> for its"),
        ("mode=evaluate", "mode=evaluate needs a trained run; type resume=<a run folder>"),
        ("mode=evaluate resume=x", "resume=x does not exist; type resume=<a run folder"),
    ):
        assert said in str(answer(*typed.split())), typed
