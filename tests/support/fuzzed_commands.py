"""Commands to type behind `python src/train.py`, drawn from the schema and conf/: a new key or option is in them."""

import inspect
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import yaml
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lockstep.config.check import CHECKED_BY_TYPE, flatten, locate
from lockstep.config.schema import CONF, RunConfig
from support.configs import composed_with_hydra
from support.fuzzed_values import inside, targets, typed, wild

Words = st.SearchStrategy[list[str]]

OPTIONS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name not in ("hydra", "local")
}
SLOW_LAUNCHERS = ("spawn", "torchrun", "slurm")  # they import torch again, or need a cluster
SMALL = "trainer.max_steps=1"  # appended, so that a run that starts ends soon
QUICK_TO_COMPILE = ("trainer.compile=false", "trainer.compile=null")  # true takes a minute
RANKS = ["1", "2", "3", "auto", "cpu"]  # numbers of ranks that this machine can start
FLAGS = [["-m"], ["--multirun"], ["--cfg", "job"], ["--cfg", "all"], ["--resolve"], ["--info"], ["--config-name", "x"]]
FLAGS += [
    ["--config-dir", "nowhere"],
    ["--config-path", "nowhere"],
    ["-p", "trainer"],
    ["--cfg"],
    ["--nothing"],
    ["--"],
]
OF_HYDRA = ("hydra.run.", "hydra.sweep.", "hydra.sweeper.", "hydra.launcher.", "hydra.job.")
KEY_FORMS = [
    "{0}",
    "{0}.",
    ".{0}",
    "{0}..x",
    "{0}.x",
    "{0}.0",
    "{0}[0]",
    "{0}@x",
    "{0}@",
    "@{0}",
    "{0}/x",
    "/{0}",
    "x.{0}",
]
KEY_FORMS += ["{0} ", " {0}", "{0}:x", "{0}=x", "é{0}", "'{0}'", "${{{0}}}", "{0}\n"]


def _typed_keys() -> list[tuple[str, str, Any, Any]]:
    """(option that has the key, key, type, value in conf/) of each key with a type. The option is empty for a key of
    every run."""
    found, flat = [], flatten(OmegaConf.to_container(composed_with_hydra(), resolve=False))
    hints = get_type_hints(RunConfig, include_extras=True)
    for section, kind in [(field.name, hints[field.name]) for field in fields(RunConfig)]:
        inner = get_type_hints(kind, include_extras=True) if is_dataclass(kind) else {}
        names = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
        keys = {f"{section}.{name}": inner[name] for name in sorted(names)} or {section: kind}
        found += [("", key, kind, flat.get(key)) for key, kind in keys.items()]
    for group, options in OPTIONS.items():
        for option in options:
            node: Any = yaml.safe_load((CONF / group / f"{option}.yaml").read_text()) or {}
            node, prefix = (node[option], f"logger.{option}") if group == "logger" else (node.get(group, node), group)
            if str(node.get("_target_")).startswith(CHECKED_BY_TYPE):
                target: Any = locate(group, node["_target_"])
                kinds = inspect.get_annotations(target.__init__ if isinstance(target, type) else target, eval_str=True)
                values = {name: value for name, value in node.items() if name in kinds}
                found += [
                    (f"{group}={option}", f"{prefix}.{name}", kinds[name], value) for name, value in values.items()
                ]
    return found


def _all_keys() -> list[str]:
    """Every key of the composed config, those of Hydra's own that say where and what runs, the sections, and some that
    do not exist."""
    flat = flatten(OmegaConf.to_container(composed_with_hydra(), resolve=False))
    flat = {key: value for key, value in flat.items() if not key.startswith("hydra.") or key.startswith(OF_HYDRA)}
    sections = {key.rpartition(".")[0] for key in flat} - {""}
    return sorted({*flat, *sections, *OPTIONS, "x", "trainer.x", "model.x", "hydra.x", "_target_", "hydra/launcher"})


TYPED = _typed_keys()
ALL_KEYS = _all_keys()


def option_words() -> st.SearchStrategy[str]:
    """`group=option`. Launchers that take seconds are rare."""
    choices = [(group, option) for group, options in OPTIONS.items() for option in options]
    quick = [(group, option) for group, option in choices if option not in SLOW_LAUNCHERS]
    return st.sampled_from(quick * 4 + choices).map("=".join)


@st.composite
def typed_words(draw: st.DrawFn) -> list[str]:
    """A value for a key with a type, behind the option that has this key."""
    option, key, kind, value = draw(st.sampled_from(TYPED))
    is_ranks = key == "launch.nproc_per_node" and draw(st.booleans())
    value = draw(st.sampled_from(RANKS) if is_ranks else typed(kind, value))
    return [word for word in (option, f"{draw(prefixes)}{key}={value}") if word]


prefixes = st.sampled_from(["", "", "", "", "", "+", "++"])


@st.composite
def any_words(draw: st.DrawFn) -> list[str]:
    """Any key, changed, removed, added, or written in a broken form."""
    key = draw(st.sampled_from(ALL_KEYS))
    if draw(st.integers(0, 3)) == 0:
        key = draw(st.sampled_from(KEY_FORMS)).format(key)
    if draw(st.integers(0, 5)) == 0:
        return [draw(st.sampled_from([f"~{key}", key, f"~{key}=x", f"+{key}", f"{key}=", f"++~{key}", "=", "~", "+"]))]
    value = draw(targets if key.endswith("_target_") else wild)
    return [f"{draw(prefixes)}{key}={value}"]


@st.composite
def wild_options(draw: st.DrawFn) -> list[str]:
    """A group with a value that is none of its options."""
    group = draw(st.sampled_from(sorted(OPTIONS)))
    options = draw(st.lists(st.sampled_from(OPTIONS[group]), min_size=1, max_size=3))
    shapes = [",".join(options), f"[{','.join(options)}]", options[0].upper(), f"{options[0]}.yaml", f"/{options[0]}"]
    value = draw(st.sampled_from(shapes) | wild)
    return [f"{draw(prefixes)}{group}={value}"]


@st.composite
def commands(draw: st.DrawFn) -> list[str]:
    """A whole command: options of groups, and one to three changes of any kind."""
    words = draw(st.lists(option_words(), max_size=3))
    changes: Any = st.one_of(typed_words(), typed_words(), any_words(), wild_options())
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        words += draw(changes)
    if draw(st.integers(0, 11)) == 0:
        words += draw(st.sampled_from(FLAGS))
    return limited(words)


@st.composite
def accepted_commands(draw: st.DrawFn) -> list[str]:
    """Options of several groups, and values that the types of some keys accept. Half of them on two ranks."""
    words = [draw(option_words()) for _ in range(draw(st.integers(1, 5)))]
    if draw(st.booleans()):
        words.append("launch=fork")
    chosen = [(key, kind, value) for option, key, kind, value in TYPED if option in ("", *words)]
    for _ in range(draw(st.integers(0, 4))):
        key, kind, value = draw(st.sampled_from(chosen))
        value = draw(st.sampled_from(RANKS) if key == "launch.nproc_per_node" else inside(kind, value))
        words.append(f"{key}={value}")
    return limited(words)


def limited(words: list[str]) -> list[str]:
    """The command with few steps, and with as many ranks as a small machine can start."""
    if any("nproc_per_node" in word for word in words):  # the global batch then limits the number of ranks
        words = [word for word in words if "batch_size" not in word]
    words = [word for word in words if not word.startswith("trainer.compile=") or word in QUICK_TO_COMPILE]
    return words if any("max_steps" in word for word in words) else [*words, SMALL]
