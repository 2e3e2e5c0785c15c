"""Every `key=value` that a sentence tells people to type exists, and its value is accepted."""

import ast
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from lockstep.config.schema import (
    GROUPS,
    KEYS_BESIDE,
    SECTIONS,
    Dataset,
    Rule,
    Run,
    join,
    rules,
    rules_in_conf,
    values_in_conf,
)
from support.commands import ROOT
from support.refusals import answer, assert_advice_helps

FILLED_IN = "\0"  # of an f-string
WORD = re.compile(rf"[+~]*(?P<key>[a-z_]+(\.[a-z_]+)*)=(?P<value>[^\s{FILLED_IN}<>.…][^\s{FILLED_IN}<>]*)?")
# Words that are no keys of the config: in a sentence about a file, about Hydra, or about the user's own code.
OTHERS = frozenset({"key", "sweep.dir", "run.dir", "reduction", "env", "sparse", "use_reentrant"})


def sentences() -> Iterator[tuple[str, str]]:
    """(file:line, text) of every text in src/ with "type ", its values left out."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        inside = {id(part) for node in joined for part in node.values}
        for node in [*joined, *ast.walk(tree)]:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else FILLED_IN for part in parts]
            text = "".join(part for part in texts if isinstance(part, str))
            if id(node) not in inside and "type " in text:
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", text


def advised() -> Iterator[tuple[str, str, str]]:
    """(file:line, key, value) of every word to type in them. The value is empty where the sentence fills it in."""
    for place, text in sentences():
        for word in re.split(r"[\s`]+", text.partition("type ")[2].replace("'", " ")):
            found = WORD.fullmatch(word.rstrip(",.;:)"))
            if found is not None and found["key"] not in OTHERS and not found["key"].startswith("hydra."):
                value = found["value"] or ""
                yield place, found["key"], "" if "..." in value or "%" in value else value


def known_keys() -> dict[str, list[Rule | None]]:
    """{key: its rules} of every section and every option. None: a key that takes any value."""
    found: dict[str, list[Rule | None]] = defaultdict(list)
    for section, schema in {"": Run, "dataset": Dataset, **KEYS_BESIDE, **SECTIONS}.items():
        for name, rule in rules(schema).items():
            found[join(section, name)].append(rule)
    for group, options in GROUPS.items():
        for option in options:
            values = values_in_conf(group, option)
            prefix, values = (f"logger.{option}", values[option]) if group == "logger" else (group, values)
            known = rules_in_conf(group, option)
            for name in values:
                found[f"{prefix}.{name}"].append(known.get(name))
    return found


def is_accepted(word: str, known: list[Rule | None]) -> bool:
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:  # the sentence goes on behind a blank
        return True
    values = list(override.sweep_iterator()) if override.is_discrete_sweep() else [override.value()]
    return all(any(rule is None or rule.accepts(rule.as_declared(value)) for rule in known) for value in values)


def test_the_words_that_a_sentence_says_to_type_are_accepted() -> None:
    keys, wrong, tried = known_keys(), list[str](), 0
    for place, key, value in advised():
        tried += 1
        group, _, name = key.partition(".")
        if key in (*GROUPS, "experiment"):
            options = {path.stem for path in (Path(ROOT) / "conf" / key).glob("*.yaml")}
            right = value.strip("[]") == "" or set(value.strip("[]").split(",")) <= options
        elif group == "task" and name.startswith(("metrics.", "loss.", "measures.")):
            right = True  # keys of the user's own
        else:
            right = key in keys and (not value or is_accepted(f"{key}={value}", keys[key]))
        if not right:
            wrong.append(f"{place}: {key}={value}")
    assert wrong == [], "\n".join(wrong)
    assert tried > 200


# What a person types who comes from another program, and what the sentence says to type: always accepted when typed.
TYPED = """
# Lightning, Transformers, timm, plain PyTorch
trainer.gradient_clip_val=1.0 -> trainer.max_grad_norm=1.0
trainer.accumulate_grad_batches=4 -> trainer.gradient_accumulation_steps=4
trainer.num_train_epochs=3 -> trainer.epochs=3
trainer.per_device_train_batch_size=8 -> trainer.batch_size_per_rank=8
trainer.check_val_every_n_epoch=2 -> evaluation.every=2
trainer.log_every_n_steps=10 -> logging.every=10
trainer.limit_train_batches=10 -> trainer.max_steps=10
trainer.early_stopping=3 -> evaluation.patience=3
trainer.patience=3 -> evaluation.patience=3
trainer.warmup_epochs=1 -> scheduler.warmup_epochs=1
trainer.strategy=ddp -> strategy=ddp
trainer.optimizer=adam -> optimizer=adamw
trainer.devices=2 -> launch=torchrun launch.nproc_per_node=2
trainer.seed=3 -> seed=3
trainer.num_workers=2 -> dataset.workers=2
dataset=csv -> dataset=image_csv
dataset=folder -> dataset=image_folder
trainer.weight_decay=0.1 -> optimizer.weight_decay=0.1
trainer.label_smoothing=0.1 -> task.label_smoothing=0.1
trainer.ema_decay=0.99 -> trainer.ema=0.99
trainer.fp16=true -> trainer.precision=fp16
trainer.precision=bf16-mixed -> trainer.precision=bf16
trainer.default_root_dir=x -> hydra.run.dir=x
fp16=true -> trainer.precision=fp16
log_every=10 -> logging.every=10
bs=32 -> trainer.batch_size=32
data.batch_size=32 -> trainer.batch_size=32
data.workers=2 -> dataset.workers=2
dataset.image_size=224 -> python src/train.py --cfg job to see all keys
eval.every=2 -> evaluation.every=2
optimizer.scheduler=cosine -> scheduler=cosine
optimizer.wd=0.1 -> optimizer.weight_decay=0.1
optimizer.param_groups=[] -> optimizer.groups=[]
optimizer=torch.optim.Adam -> optimizer._target_=torch.optim.Adam
optimizer=adamw optimizer.beta1=0.9 -> python src/train.py --cfg job to see all keys
scheduler=CosineAnnealingLR -> scheduler=cosine
scheduler=reduce_on_plateau -> scheduler=plateau
scheduler=none -> scheduler=constant
strategy=ddp_spawn -> strategy=ddp
backend=cpu -> backend=gloo
sync_bn=1 -> sync_bn=on
dataset=fashion-mnist -> dataset=fashion_mnist
data=/data/photos -> dataset=image_folder dataset.root=/data/photos
dataset=/data/photos -> dataset=image_folder dataset.root=/data/photos
loss=mse -> task=regression
task.loss=mse -> task=regression
task.loss=torch.nn.MSELoss -> task.loss={_target_:torch.nn.MSELoss}
--fp16 -> trainer.precision=fp16
--max-epochs=3 -> trainer.epochs=3
--data=/data/photos -> dataset=image_folder dataset.root=/data/photos
# other keys of the section would do something else
trainer.min_epochs=1 -> python src/train.py --cfg job to see all keys
trainer.warmup_steps=100 -> python src/train.py --cfg job to see all keys
launch=fork launch.workers=2 -> python src/train.py --cfg job to see all keys
model=mlp model.layers=3 -> python src/train.py model=mlp --cfg job to see all keys
gradient_sync=powersgd gradient_sync.matrix_rank=0 -> python src/train.py --cfg job to see all keys
# values: types, units, lists, commas, quotes, spaces
snapshot.every=10 -> snapshot.every=10epochs or snapshot.every=10steps or snapshot.every=10min
snapshot.every=5m -> snapshot.every=5min
snapshot.every=5minutes -> snapshot.every=5min
"snapshot.every=100" steps -> snapshot.every=100steps
trainer.epochs=2.5 -> trainer.epochs=2 or trainer.epochs=3
trainer.epochs=3epochs -> trainer.epochs=3
trainer.epochs=[3] -> trainer.epochs=3
trainer.epochs=3, -> trainer.epochs=3
trainer.epochs=３ -> trainer.epochs=3
trainer.epochs=1,000 -> trainer.epochs=1000
trainer.epochs:3 -> trainer.epochs=3
trainer/epochs=3 -> trainer.epochs=3
trainer epochs=3 -> trainer.epochs=3
trainer.max_steps=-1 -> trainer.max_steps=null
trainer.ema=0 -> trainer.ema=null
trainer.compile=1 -> trainer.compile=true
trainer.channels_last=yes -> trainer.channels_last=true
trainer.deterministic=warn -> trainer.deterministic=true or trainer.deterministic=false
trainer.precision=half -> trainer.precision=<one of them>
optimizer.lr=0,1 -> optimizer.lr=0.1
optimizer.lr=1/10 -> optimizer.lr=0.1
optimizer.lr=10% -> optimizer.lr=0.1
optimizer.lr=1e-3, -> optimizer.lr=1e-3
optimizer.lr=[0.1,0.2] -> -m optimizer.lr=0.1,0.2
optimizer.lr=uniform(0.1,0.2) -> -m sweep.search=random sweep.trials=20 'optimizer.lr=interval(0.1,0.2)'
optimizer.weight-decay=0.1 -> optimizer.weight_decay=0.1
optimizer=adamw optimizer.betas=(0.9,0.95) -> 'optimizer.betas=[0.9,0.95]'
optimizer=adamw optimizer.betas=0.9,0.95 -> 'optimizer.betas=[0.9,0.95]'
optimizer.groups={match:fc,lr:0.1} -> optimizer.groups=[{match:fc,lr:0.1}]
strategy=tensor_parallel strategy.plan={0:colwise} -> strategy.plan=[{0:colwise}]
freeze=backbone,head -> 'freeze=[backbone,head]'
freeze=true -> freeze=[<name>]
logger=tensorboard,csv -> 'logger=[tensorboard,csv]'
model=mlp model.dropout=50% -> model.dropout=0.5
resume=true -> resume=<a run folder>
resume= -> resume=null
"sweep.constraints=optimizer.lr < 1" -> 'sweep.constraints=["optimizer.lr < 1"]'
sweep.search=grid -> sweep.search=<one of them>
"sweep.constraints=[optimizer.lr < 1]" -> 'sweep.constraints=["optimizer.lr < 1"]'
optimizer.no_decay=[bias -> 'optimizer.no_decay=[bias]'
dataset.mean=(0.5,) -> 'dataset.mean=[0.5]'
dataset.batch_transforms=mixup -> dataset.batch_transforms=[{_target_:lockstep.data.transforms.RandomErasing,p:0.25}]
trainer.ema=99.9% -> trainer.ema=0.999
watch.timeout=60s -> watch.timeout=60
profiler=true -> profiler.enabled=true
profiler=on -> profiler.enabled=true
"""


def test_a_word_of_another_program_is_answered_with_what_is_accepted() -> None:
    wrong = []
    rows = [row.split(" -> ") for row in TYPED.strip().splitlines() if not row.startswith("#")]
    for typed, advice in rows:
        words = shlex.split(typed)
        sentence = answer(*words)
        if sentence is None or not sentence.endswith(f"; type {advice}"):
            wrong.append(f"{typed}: {sentence}")
        elif not advice.startswith("-m "):
            assert_advice_helps(words[:-1] if "=" in words[0] else [], sentence)
    assert wrong == [], "\n".join(wrong)
