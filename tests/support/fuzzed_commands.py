"""Commands to type behind `python src/train.py`, drawn from the schema and conf/: a new key or option is in them."""

from typing import Any

from hypothesis import strategies as st
from omegaconf import OmegaConf

from lockstep.config.schema import GROUPS, SECTIONS, Dataset, Rule, Run, flatten, rules, rules_in_conf
from support.commands import ROOT
from support.configs import composed_with_hydra
from support.fuzzed_values import inside, targets, typed, wild

Words = st.SearchStrategy[list[str]]

CONF = ROOT / "conf"
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


def _ruled_keys() -> list[tuple[str, str, Rule]]:
    """(option that has the key, key, rule) of each field of the schema. The option is empty for a key of every run."""
    found = []
    for section, schema in {"": Run, "dataset": Dataset, **SECTIONS}.items():
        found += [("", f"{section}.{name}".lstrip("."), rule) for name, rule in rules(schema).items()]
    for group, options in GROUPS.items():
        for option in options:
            prefix = f"logger.{option}" if group == "logger" else group
            known = rules_in_conf(group, option).items()
            found += [(f"{group}={option}", f"{prefix}.{name}", rule) for name, rule in known]
    return found


def _all_keys() -> list[str]:
    """Every key of the composed config, Hydra's own included, the sections, and some that do not exist."""
    flat = flatten(OmegaConf.to_container(composed_with_hydra(), resolve=False))
    sections = {key.rpartition(".")[0] for key in flat} - {""}
    return sorted({*flat, *sections, *OPTIONS, "x", "trainer.x", "model.x", "hydra.x", "_target_", "hydra/launcher"})


RULED = _ruled_keys()
ALL_KEYS = _all_keys()


def option_words() -> st.SearchStrategy[str]:
    """`group=option`. Launchers that take seconds are rare."""
    choices = [(group, option) for group, options in OPTIONS.items() for option in options]
    quick = [(group, option) for group, option in choices if option not in SLOW_LAUNCHERS]
    return st.sampled_from(quick * 4 + choices).map("=".join)


@st.composite
def ruled_words(draw: st.DrawFn) -> list[str]:
    """A value for a key of the schema, behind the option that has this key."""
    option, key, rule = draw(st.sampled_from(RULED))
    value = draw(st.sampled_from(RANKS) if key == "launch.nproc_per_node" and draw(st.booleans()) else typed(rule))
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
    changes: Any = st.one_of(ruled_words(), ruled_words(), any_words(), wild_options())
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        words += draw(changes)
    if draw(st.integers(0, 11)) == 0:
        words += draw(st.sampled_from(FLAGS))
    return limited(words)


@st.composite
def accepted_commands(draw: st.DrawFn) -> list[str]:
    """Options of several groups, and values that the rules of some keys accept. Half of them on two ranks."""
    words = [draw(option_words()) for _ in range(draw(st.integers(1, 5)))]
    if draw(st.booleans()):
        words.append("launch=fork")
    chosen = [(key, rule) for option, key, rule in RULED if option in ("", *words)]
    for _ in range(draw(st.integers(0, 4))):
        key, rule = draw(st.sampled_from(chosen))
        value = draw(st.sampled_from(RANKS) if key == "launch.nproc_per_node" else inside(rule))
        words.append(f"{key}={value}")
    return limited(words)


def limited(words: list[str]) -> list[str]:
    """The command with few steps, and with as many ranks as a small machine can start."""
    if any("nproc_per_node" in word for word in words):  # the global batch then limits the number of ranks
        words = [word for word in words if "batch_size" not in word]
    words = [word for word in words if not word.startswith("trainer.compile=") or word in QUICK_TO_COMPILE]
    return words if any("max_steps" in word for word in words) else [*words, SMALL]
