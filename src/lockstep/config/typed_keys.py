"""What is typed, and would be ignored or looked for elsewhere without a word. No torch here."""

import re
from pathlib import Path
from typing import Any, cast

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from lockstep.config.check import Node, flatten
from lockstep.config.fields import enumerate_words, rules
from lockstep.config.options import GROUPS
from lockstep.config.schema import SECTIONS, Run
from lockstep.config.suggest import ALIASES, closest, unknown_key
from lockstep.errors import ConfigError

GROUPS_AND_SECTIONS = {*GROUPS, *SECTIONS}
FOLDERS = ("data_dir", "resume", "init", "run_dir")
READ = {*GROUPS_AND_SECTIONS, *rules(Run), "local", "experiment"}


def check_typed_keys(cfg: DictConfig, values: Node, hydra_cfg: HydraConf) -> None:
    """Raise ConfigError for an unread key that stands for another: +epochs=3 for trainer.epochs=3.

    cfg: with its interpolations. values: of `cfg`, resolved. A key of the user's own, such as a tag, is left alone.
    """
    keys = list(flatten(values))
    names = {key.rpartition(".")[2] for key in keys if key.partition(".")[0] in GROUPS_AND_SECTIONS}
    for key, value in _unread(cfg, hydra_cfg).items():
        top, dot, _ = key.partition(".")
        is_name = key in names and key != "name"  # which is a label of the run, and no backend.name
        if _is_misspelled(top) or (not dot and (is_name or key in ALIASES)):
            others = [other for other in keys if other != key]
            raise ConfigError(unknown_key(key, value, others, {}))


def _is_misspelled(name: str) -> bool:
    """Of a group or a section. A label such as task_id or data is none."""
    same_letters = any(sorted(name) == sorted(other) for other in GROUPS_AND_SECTIONS)
    return same_letters or closest(name, GROUPS_AND_SECTIONS, similarity=0.88) is not None


def notice_of_unread_keys(cfg: DictConfig, hydra_cfg: HydraConf) -> str:
    """A sentence about the keys with `+` that nothing reads, empty without such keys."""
    unread = list(_unread(cfg, hydra_cfg))
    if not unread:
        return ""
    return f"nothing in this run reads {enumerate_words(unread, 'or')}"


def _unread(cfg: DictConfig, hydra_cfg: HydraConf) -> dict[str, str]:
    """{key: value} as typed, of keys with a `+` that are no part of this project, nor of an interpolation."""
    words: Any = OmegaConf.to_container(hydra_cfg.overrides.task, resolve=False)
    typed = [str(word).lstrip("+").partition("=") for word in words if str(word).startswith("+")]
    own = {key: value for key, _, value in typed if key.partition(".")[0] in cfg.keys() - READ}
    if not own:
        return {}
    written = f"{OmegaConf.to_container(cfg, resolve=False)}{OmegaConf.to_container(hydra_cfg, resolve=False)}"
    read = set(re.findall(r"\$\{\.*(\w+)", written))  # ${width}, ${..width}
    read |= {word for given in re.findall(r"\$\{[\w.]+:([^{}]*)", written) for word in re.findall(r"\w+", given)}
    return {key: value for key, value in own.items() if key.partition(".")[0] not in read}


def with_whole_folders(cfg: DictConfig, hydra_cfg: HydraConf) -> DictConfig:
    """`cfg` with folders that mean the same where hydra.job.chdir=true makes the run's folder the current one."""
    if not hydra_cfg.job.chdir:
        return cfg
    typed = {key: OmegaConf.select(cfg, key) for key in FOLDERS}
    whole = {key: str(Path(hydra_cfg.runtime.cwd, path)) for key, path in typed.items() if isinstance(path, str)}
    return cast(DictConfig, OmegaConf.merge(cfg, whole))
