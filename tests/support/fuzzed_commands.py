"""Commands to type behind `python src/train.py`, drawn from the schema and conf/: a new key or option is in them."""

import inspect
import json
import math
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Literal, get_args, get_origin, get_type_hints

import yaml
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError

from lockstep.config.check import CHECKED_BY_TYPE, OPTIONS, flatten, locate
from lockstep.config.schema import CONF, RunConfig
from lockstep.errors import ConfigError, show
from support.configs import composed_with_hydra

SLOW_LAUNCHERS = ("spawn", "torchrun", "slurm")  # they import torch again, or need a cluster
SMALL = "trainer.max_steps=1"  # appended, so that a run that starts ends soon
QUICK_TO_COMPILE = ("trainer.compile=false", "trainer.compile=null")  # true takes a minute
RANKS = ["1", "2", "3", "auto", "cpu"]  # numbers of ranks that this machine can start
FLAGS = [["-m"], ["--cfg", "job"], ["--resolve"], ["--info"], ["--config-name", "x"], ["--config-dir", "nowhere"]]
FLAGS += [["--config-path", "nowhere"], ["-p", "trainer"], ["--cfg"], ["--nothing"], ["--"]]
OF_HYDRA = ("hydra.run.", "hydra.sweep.", "hydra.sweeper.", "hydra.launcher.", "hydra.job.")
KEY_FORMS = "{0} {0}. .{0} {0}..x {0}.x {0}.0 {0}[0] {0}@x {0}@ @{0} {0}/x /{0} x.{0} {0}:x {0}=x é{0} '{0}' ${{{0}}}"
WILD_TEXT = """-1 0 2 0.5 1e-320 1e308 1e400 2147483648 18446744073709551616 nan inf -inf 007 0x10 1_000 .5 5. 1,5
null None true off yes auto ??? ~ a.b a/b a:b a=b % %(x)s {0} $ $x # @ & ! * ; |
[] [[]] [null] [1,2,3] [nan] {} {a:1} {a:{b:2}} {1:2} [{a:1}] {a:[1,[2]]} [${seed}] {_target_:os.getcwd} {_args_:3}
${x} ${seed} ${trainer} ${trainer.epochs} ${oc.env:NOT_THERE} ${oc.decode:'['} ${oc.nope:1} ${.x} ${..seed} ${ ${}
${hydra:nope} \\${x} ${started:} a${seed}b ${oc.dict.keys:trainer} ${now:%Y} ${model} ${dataset.shape}
' \" 'a a'b [ ] { } [a {a: (a a( ) , a, ,a [,] {,} [1 ${a \\ '' 1,2 a,b range(1,3) choice() interval(0,1) glob(*) int(x)
sort(3,1) str([1]) json_str({a:1}) tag(a,1,2) range(1,2,0) nope(1) /etc/passwd /proc/x /dev/null . .. nowhere ~/x
é 日本 😀 \u200b \udcff x\x1b[0m \ufeff"""
WILD = WILD_TEXT.split()
WILD += [" ", "\t", "\n", "a b", "a\nb", "\r", "", "a" * 300, "9" * 400, "[" * 60, "a" * 5000]
TARGETS = (
    "os.getcwd torch.nn.Linear torch.nn.Identity torch.optim.RMSprop lockstep.models.tutorial.mlp nowhere.No torch "
)
TARGETS += "lockstep.strategies.ddp.DDP lockstep.nothing math.pi a..b . lockstep.tasks.tasks.Regression torch.optim.SGD"
# Small, so that a run with them is, too.
POOL = [None, True, False, -1, 0, 1, 2, 3, 8, 0.5, 0.01, 1.0, 1e-6, -0.5, 1e5, math.nan, math.inf, 10**12]
POOL += [2**64, "text", "auto", "90s", "2steps", "1epochs", "null", [], [1], [0.1], [1, 8, 8], ["norm"], [0.9, 0.999]]
wild = st.sampled_from(WILD) | st.text(st.characters(exclude_characters="\0"), max_size=6)
prefixes = st.sampled_from(["", "", "", "", "", "+", "++"])


@cache
def _adapter(kind):
    return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False))


def accepts(kind, value):
    try:
        _adapter(kind).validate_json(json.dumps(value), strict=True)
    except (ValidationError, ConfigError):  # one that a type raises
        return False
    return True


def words_of(kind):
    named = [word for member in get_args(kind) for word in words_of(member)]
    return list(get_args(kind)) if get_origin(kind) is Literal else named


def _typed_keys():
    """(option that has the key, key, values that its type accepts) of each key with a type. The option is empty for a
    key of every run."""
    found, flat = [], flatten(OmegaConf.to_container(composed_with_hydra(), resolve=False))
    for section, kind in get_type_hints(RunConfig, include_extras=True).items():
        inner = get_type_hints(kind, include_extras=True) if is_dataclass(kind) else {}
        keys = {f"{section}.{field.name}": inner[field.name] for field in fields(kind)} if inner else {section: kind}
        found += [("", key, kind, flat.get(key)) for key, kind in keys.items()]
    for group, option in CHOICES:
        node = yaml.safe_load((CONF / group / f"{option}.yaml").read_text()) or {}
        node, prefix = (node[option], f"logger.{option}") if group == "logger" else (node.get(group, node), group)
        if str(node.get("_target_")).startswith(CHECKED_BY_TYPE):
            target = locate(group, node["_target_"])
            kinds = inspect.get_annotations(target.__init__ if isinstance(target, type) else target, eval_str=True)
            values = {name: value for name, value in node.items() if name in kinds}
            found += [(f"{group}={option}", f"{prefix}.{name}", kinds[name], value) for name, value in values.items()]
    accepted = [[one for one in (*words_of(kind), value, *POOL) if accepts(kind, one)] for *_, kind, value in found]
    return [
        (option, key, RANKS if key == "launch.nproc_per_node" else [*map(show, values or [value])])
        for (option, key, _, value), values in zip(found, accepted, strict=True)
    ]


def _all_keys():
    """Every key of the composed config, of Hydra's own those that say where and what runs, sections, and others."""
    flat = flatten(OmegaConf.to_container(composed_with_hydra(), resolve=False))
    flat = {key: value for key, value in flat.items() if not key.startswith("hydra.") or key.startswith(OF_HYDRA)}
    sections = {key.rpartition(".")[0] for key in flat} - {""}
    return sorted({*flat, *sections, *OPTIONS, "x", "trainer.x", "model.x", "hydra.x", "_target_", "hydra/launcher"})


CHOICES = [(group, option) for group, options in OPTIONS.items() for option in options]
TYPED, ALL_KEYS = _typed_keys(), _all_keys()
option_words = st.sampled_from([one for one in CHOICES if one[1] not in SLOW_LAUNCHERS] * 4 + CHOICES).map("=".join)


@st.composite
def typed_words(draw):
    """A value for a key with a type, behind the option that has this key. Half are values that the type accepts."""
    option, key, accepted = draw(st.sampled_from(TYPED))
    value = draw(st.one_of(*[st.sampled_from(accepted)] * 2, st.sampled_from(POOL).map(show), wild))
    return [word for word in (option, f"{draw(prefixes)}{key}={value}") if word]


@st.composite
def any_words(draw):
    """Any key, changed, removed, added, or written in a broken form; or a group with none of its options."""
    if draw(st.integers(0, 3)) == 0:
        group = draw(st.sampled_from(sorted(OPTIONS)))
        options = draw(st.lists(st.sampled_from(OPTIONS[group]), min_size=1, max_size=3))
        shapes = [",".join(options), f"[{','.join(options)}]", options[0].upper(), f"{options[0]}.yaml"]
        return [f"{draw(prefixes)}{group}={draw(st.sampled_from([*shapes, f'/{options[0]}']) | wild)}"]
    key = draw(st.sampled_from(ALL_KEYS))
    if draw(st.integers(0, 3)) == 0:
        key = draw(st.sampled_from([*KEY_FORMS.split(), "{0} ", " {0}", "{0}\n"])).format(key)
    if draw(st.integers(0, 5)) == 0:
        return [draw(st.sampled_from([f"~{key}", key, f"~{key}=x", f"+{key}", f"{key}=", f"++~{key}", "=", "~", "+"]))]
    values = st.sampled_from(TARGETS.split()) if key.endswith("_target_") else wild
    return [f"{draw(prefixes)}{key}={draw(values)}"]


@st.composite
def commands(draw):
    words = draw(st.lists(option_words, max_size=3))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        words += draw(typed_words() | any_words())
    return limited(words + draw(st.sampled_from([[]] * 80 + FLAGS)))


@st.composite
def accepted_commands(draw):
    """Options of several groups, and values that the types of some keys accept. Half of them on two ranks."""
    words = draw(st.lists(option_words, min_size=1, max_size=5)) + ["launch=fork"] * draw(st.booleans())
    chosen = st.sampled_from([(key, values) for option, key, values in TYPED if option in ("", *words)])
    typed = draw(st.lists(chosen, max_size=4))
    return limited([*words, *(f"{key}={draw(st.sampled_from(values))}" for key, values in typed)])


def limited(words):
    """The command with few steps, and with as many ranks as a small machine can start."""
    if any("nproc_per_node" in word for word in words):  # the global batch then limits the number of ranks
        words = [word for word in words if "batch_size" not in word]
    words = [word for word in words if not word.startswith("trainer.compile=") or word in QUICK_TO_COMPILE]
    return words if any("max_steps" in word for word in words) else [*words, SMALL]
