"""Which classes and functions a config may name, so that a config from a stranger cannot run what it likes.

1. What the user has typed is allowed, whatever it is.
2. So are the parts of this project, torch and torchvision that configs are made of: OPEN.
3. A config folder of the user's own may name anything but the standard library.
4. The record of a run, `.hydra`, may be a stranger's: it may name what 1 and 2 allow, and no more.

No torch here: this runs before anything is imported that a config names. docs/security.md has the limits.
"""

import copy
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import hydra.utils
import yaml  # type: ignore[import-untyped]
from hydra.conf import HydraConf
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf

from lockstep.compat import hydra_may_call_all, key_of
from lockstep.config.schema import (
    CONF,
    HYDRA_KEYS,
    NOT_PASSED,
    OF_TORCH,
    Node,
    as_dict,
    enumerate_words,
    join,
    nodes_in_conf,
    nodes_with_target,
    rules,
    show,
)
from lockstep.config.suggest import closest
from lockstep.errors import ConfigError

OPEN = (
    *(f"lockstep.{name}." for name in ("models", "data", "tasks", "strategies", "loggers", "launchers", "modes")),
    "lockstep.training.async_parameter_server.",
    "lockstep.training.optimizers.",
    "lockstep.training.schedulers.",
    *("torch.nn.", "torch.optim.", "torch.utils.data."),
    *(f"torchvision.{name}." for name in ("datasets", "models", "ops", "transforms")),
)
BUILT_IN = ("torch", "torch._C._nn")  # where torch's functions in C say that they are from
TARGET = r"_target_[\"']?:\s*[\"']?([\w.]+(?:\$\{[^}]*\}|[\w.])*)"  # as written in YAML, on a line or in braces
RECORD = ".hydra"
RECORD_FILES = ("hydra.yaml", "overrides.yaml")


class ForeignName(ValueError):
    """A dotted name that leads out of its package: torch.os.system is os.system, and no part of torch."""


def check_targets(cfg: DictConfig | Node, hydra_cfg: HydraConf) -> None:
    """Raise ConfigError for a `_target_` that is not allowed. hydra_cfg: the words typed, and the config folders."""
    typed = set(re.findall(r"[\w.]+", " ".join(hydra_cfg.overrides.task)))
    folders = [Path(source.path) for source in hydra_cfg.runtime.config_sources if source.schema == "file"]
    for key, node in nodes_with_target(as_dict(cfg)):
        name = node["_target_"]
        if name not in typed and not is_open(name) and not _named_in(folders, name):
            where = join(key, "_target_")
            raise ConfigError(
                f"{where}={name} may run anything, and neither the command line nor a config folder of your own names "
                f"it; if you trust it, type {where}={name}"
            )


def is_open(name: str) -> bool:
    """Whether any config may name it: it is public, and in one of the packages of OPEN."""
    return name.startswith(OPEN) and not any(part.startswith("_") for part in name.split("."))


def chooses_foreign_target(word: str) -> bool:
    """Whether an override names a `_target_` that only its user may choose, and no record of a run."""
    key, _, value = word.partition("=")
    if key.endswith("_target_") and "," in value:  # of a sweep
        return not all(is_open(name.strip()) for name in value.split(","))
    return "_target_" in word and not all(map(is_open, re.findall(r"_target_['\"]?\s*[=:]\s*([^,}\s]*)", word)))


def require_own_name(name: str, place: str, found: object) -> None:
    """Raise ForeignName if `found`, which is at the `place` on the way to `name`, is not from the package of `name`."""
    if not callable(found) and not isinstance(found, ModuleType):
        return
    module = _module_of(found)
    home, starts_in = module.partition(".")[0], name.partition(".")[0]
    is_foreign = home in sys.stdlib_module_names and starts_in not in sys.stdlib_module_names
    if is_open(name) and isinstance(found, ModuleType):
        is_foreign = module != place
    elif is_open(name):
        is_foreign = not f"{module}.".startswith(OPEN) and not (inspect.isbuiltin(found) and module in BUILT_IN)
    if is_foreign:
        raise ForeignName(f"{place} belongs to {module}")


def refuse_foreign_record(folder: Path, config_name: str) -> None:
    """Raise ConfigError for a run's record as a config folder, if it contains more than the config of a run.

    A node `hydra` and a defaults list tell Hydra what to run before this project sees the config.
    """
    if not _is_record(folder):
        return
    if config_name.rpartition("/")[2].startswith("hydra"):
        raise ConfigError(f"{folder}/{config_name} sets up Hydra itself; type --config-name=config")
    for path in sorted(folder.rglob("*.yaml")):
        found = [] if path.name.startswith(("hydra.", "overrides.")) else _what_runs(path.read_text(errors="replace"))
        if found:
            raise ConfigError(
                f"{path} is in the record of a run and contains {found[0]}, which can run commands; remove it there if "
                f"you trust the rest, or type the overrides that stand in overrides.yaml"
            )


def _what_runs(text: str) -> list[str]:
    """What Hydra or launch=slurm would run of a config with this text."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:  # Hydra says where the error is
        return []
    config = config if isinstance(config, dict) else {}
    launch = config.get("launch")
    options = launch if isinstance(launch, dict) else {}
    found = [key for key in ("hydra", "defaults") if key in config] + ["@package"] * ("@package" in text)
    return found + [f"launch.{key}" for key in ("setup", "options") if options.get(key)]


def _named_in(folders: Sequence[Path], name: str) -> bool:
    """Whether a file of these folders has `name` as a `_target_`. An interpolation there stands for any name."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return False
    for folder in folders:
        for path in () if _is_record(folder) else folder.rglob("*.yaml"):
            if RECORD not in path.relative_to(folder).parts:
                for written in re.findall(TARGET, path.read_text(errors="replace")):
                    pattern = r"\w+(\.\w+)*".join(map(re.escape, re.split(r"\$\{[^}]*\}", written)))
                    if re.fullmatch(pattern, name):
                        return True
    return False


def _is_record(folder: Path) -> bool:
    """Whether this is a run's folder, or the record in it, perhaps under another name."""
    holds_record = (folder / RECORD).exists() or all((folder / name).exists() for name in RECORD_FILES)
    return RECORD in folder.resolve().parts or holds_record


def _module_of(found: Any) -> str:
    """The name of the module that defines `found`."""
    if isinstance(found, partial):
        return _module_of(found.func)
    if isinstance(found, ModuleType):
        return found.__name__
    return str(getattr(found, "__module__", None) or type(found).__module__)


CHECKED = (
    "model",
    "dataset",
    "optimizer",
    "scheduler",
    "strategy",
    "gradient_sync",
    "task",
    "launch",
    "logger",
    "mode",
)
# What build.py passes: the first argument by position, the others by name to those that have a parameter of that name.
POSITIONAL = {
    "optimizer": "the parameters of the model",
    "scheduler": "the optimizer",
    "scheduler.schedule": "the optimizer",
    "dataset.collate_fn": "the samples of a batch",
}
TRANSFORM = re.compile(r"dataset\.(test_)?transforms\[\d+\]")
OWN_PART = re.compile(r"task\.loss|task\.measures\.[^.]+")
PASSED_BY_NAME = {"scheduler": frozenset({"steps_per_epoch", "total_steps", "objective_mode"})}
# Modules that a config may well name, and the package that has them. Another one that is missing is the user's own.
PACKAGES = {name: name for name in ("datasets", "einops", "kornia", "lightning", "monai", "timm", "torchaudio")}
PACKAGES |= {name: name for name in ("albumentations", "peft", "torchmetrics", "transformers", "webdataset")}
PACKAGES |= {"cv2": "opencv-python", "open_clip": "open_clip_torch", "sklearn": "scikit-learn"}
PACKAGES |= {"segmentation_models_pytorch": "segmentation-models-pytorch", "torch_geometric": "torch-geometric"}
TAKEN_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
TAKES_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def without_untaken(cfg: DictConfig, words: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """A copy of `cfg` without what an option said for another `_target_`, and the one that was chosen does not take, be
    it by `words` or by a YAML file that builds on the option. And a line for each such node. Raises as `locate` does.

    So model._target_=my.Net needs no ~model.shape, and `defaults: [sgd]` can be followed by another optimizer.

    words: the typed overrides. What they set stays, and is refused if nothing takes it.
    """
    cfg = cfg.copy()
    typed = {word.partition("=")[0].lstrip("+~") for word in words}
    lines = []
    nodes = [(group, *found) for group in CHECKED for found in nodes_with_target(as_dict(cfg).get(group), group)]
    for group, key, node in nodes:
        parameters = _parameters(locate(f"{key}._target_", node["_target_"], group))
        if parameters is None or _takes_any_name(parameters):
            continue
        untaken = node.keys() - HYDRA_KEYS - NOT_PASSED.get(key, frozenset()) - parameters.keys()
        untaken -= {name for name in untaken if join(key, name) in typed}
        if untaken and f"{key}._target_" not in typed:
            untaken &= _inherited(key, node)
        for name in untaken:
            del OmegaConf.select(cfg, key)[name]
        if untaken:
            lines.append(f"{key}: {node['_target_']} takes no {enumerate_words(sorted(untaken), 'or')}; left out")
    return cfg, lines


def _inherited(key: str, node: Node) -> set[str]:
    """The keys of `node` that are those of an option in conf/ without its class, of which it has all."""
    return {
        name
        for other in nodes_in_conf(key)
        if other.get("_target_") != node["_target_"] and other.keys() <= node.keys()
        for name, value in other.items()
        if value == node[name] or "${" in str(value)
    }


def matching_arguments(target: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the `offered` arguments that `target` has a parameter for, or takes as **kwargs."""
    parameters = _parameters(target)
    if parameters is None:
        return {}
    if _takes_any_name(parameters):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def locate(key: str, path: str, group: str) -> Callable[..., Any]:
    """The object with the dotted `path`. Raises ConfigError with the error of the import."""
    if not all(path.split(".")):
        raise ConfigError(f"{key}={path} names no class; type {key}=<module>.<class>, or {_options(group)}")
    try:
        found = _import(path)
    except ForeignName as error:
        raise ConfigError(f"{key}={path} is not allowed: {error}; type {key}=<its own module>.<name>") from None
    except Exception as error:  # a module of the user's may raise anything
        reason = " ".join(str(error).split()) or "no message"
        raise ConfigError(
            f"{key}={path} cannot be imported ({type(error).__name__}: {reason}); "
            f"{_how_to_import(key, path, error)}, or type {_options(group)}"
        ) from error
    if callable(found):
        target: Callable[..., Any] = found
        return target
    raise ConfigError(f"{key}={path} is neither a class nor a function; type {key}=<module>.<class>")


def _how_to_import(key: str, path: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        if f"{path}.".startswith(f"{error.name}.") and module not in PACKAGES:
            return f"type PYTHONPATH=<folder that holds {module}> before the command"
        return f"type pip install {PACKAGES.get(module, module)}"
    if isinstance(error, AttributeError) and inspect.ismodule(error.obj) and error.name:
        meant = closest(error.name, dir(error.obj))
        return f"type {key}={error.obj.__name__}.{meant or '<name>'}"
    return "repair that module"


def _import(path: str) -> Any:
    parts = path.split(".")
    found = importlib.import_module(parts[0])
    for count, name in enumerate(parts[1:], start=2):
        place = ".".join(parts[:count])
        if not hasattr(found, name) and inspect.ismodule(found):
            try:
                importlib.import_module(place)
            except ModuleNotFoundError as error:
                if error.name != place:
                    raise
                message = f"module {found.__name__!r} has no attribute {name!r}"
                raise AttributeError(message, name=name, obj=found) from None
        found = getattr(found, name)
        require_own_name(path, place, found)
    return found


def check_signature(key: str, node: Node, target: Callable[..., Any]) -> None:
    """Raise ConfigError if `target` does not take the keys of its node, or needs others."""
    if key in POSITIONAL and not node.get("_partial_"):
        raise ConfigError(f"{key} is called later, with {POSITIONAL[key]}; type ++{key}._partial_=true")
    parameters = _parameters(target)
    if parameters is None:
        return
    given = set(node) - HYDRA_KEYS - NOT_PASSED.get(key, frozenset())
    by_position = len(node.get("_args_") or ()) + (key in POSITIONAL)
    filled = set([name for name, parameter in parameters.items() if parameter.kind in TAKEN_BY_POSITION][:by_position])
    unknown = [name for name in node if name in given and (name not in parameters or name in filled)]
    if unknown and not (_takes_any_name(parameters) and not set(unknown) & filled):
        raise ConfigError(_unknown_sentence(key, node, unknown, sorted(set(parameters) - given - filled)))
    filled |= given | PASSED_BY_NAME.get(key, frozenset())
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in TAKES_ANY and name not in filled
    ]
    if missing and (not node.get("_partial_") or key in POSITIONAL):
        raise ConfigError(_missing_sentence(key, node, missing, is_function=not inspect.isclass(target)))


def _missing_sentence(key: str, node: Node, missing: list[str], is_function: bool) -> str:
    name = node["_target_"]
    if is_function and TRANSFORM.fullmatch(key):
        return f"{name} is called later, with a sample; type _partial_: true beside _target_: {name} in {key}"
    if is_function and OWN_PART.fullmatch(key):
        return f"{name} is called later, with (outputs, targets); type ++{key}._partial_=true"
    sentence = f"{name} needs {enumerate_words(missing, 'and')}"
    if "[" in key:  # Hydra reads no override of an item of a list
        typed = " and ".join(f"{item}: <value>" for item in missing)
        return f"{sentence}; type {typed} beside _target_: {name} in {key}"
    typed = " ".join(f"+{join(key, item)}=<value>" for item in missing)
    return f"{sentence}; type {typed}, or {_options(key.partition('.')[0])}"


def _unknown_sentence(key: str, node: Node, unknown: list[str], free: list[str]) -> str:
    name = unknown[0]
    sentence = f"{node['_target_']} takes no {enumerate_words(unknown, 'and no')}"
    meant = closest(name, free)
    if len(unknown) == 1 and meant is not None:
        return f"{sentence}; type +{join(key, meant)}={show(node[name])}"
    left_out = enumerate_words([join(key, item) for item in unknown], "and")
    return f"{sentence}; leave {left_out} out, or type {_options(key.partition('.')[0])}"


def _options(group: str) -> str:
    folder = CONF / group
    return f"{group}=<an option in conf/{group}>" if folder.is_dir() else f"another {group}"


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """None if Python cannot tell, as for functions written in C."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None


def _takes_any_name(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


Kind = TypeVar("Kind")


def instantiate(node: DictConfig | ListConfig | None) -> Any:
    """The object that a node with `_target_` describes, a list for a list of nodes, None for no node.

    Raises ConfigError if the target does, and for a key that it has no argument for.
    """
    if node is None:
        return None
    try:
        return hydra.utils.instantiate(_as_declared(node), _convert_="all", **hydra_may_call_all())
    except InstantiationException as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        refused = _passed_on(node, error.__cause__)
        if refused:
            key, what = key_of(node), enumerate_words(refused, "and no")
            removed = " ".join(f"~{key}.{name}" for name in refused)
            raise ConfigError(
                f"{key}._target_={node._target_} takes no {what} ({error.__cause__}); type {removed}"
            ) from error
        raise


def _as_declared(node: Any) -> Any:
    """`node` with every value as its class declares it: a whole number as the float that AdamW needs."""
    declared = node
    for key, inner in nodes_with_target(OmegaConf.to_container(node, resolve=True)):
        path = inner["_target_"]
        known = rules(OF_TORCH[path]) if path in OF_TORCH else {}
        if path.startswith("lockstep."):
            known = rules(hydra.utils.get_object(path))
        for name in _tensor_arguments(path) if path.startswith("torch.nn.") else ():
            if isinstance(inner.get(name), list):  # such as the class weights of a loss
                declared = copy.deepcopy(node) if declared is node else declared
                made = {"_target_": "torch.FloatTensor", "_args_": [inner[name]]}
                OmegaConf.update(declared, join(key, name), made, merge=False)
        for name, rule in known.items():
            if name in inner and repr(rule.as_declared(inner[name])) != repr(inner[name]):  # 1 == 1.0
                declared = copy.deepcopy(node) if declared is node else declared
                OmegaConf.update(declared, join(key, name), rule.as_declared(inner[name]))
    return declared


def _tensor_arguments(path: str) -> list[str]:
    """The arguments of a class or function of torch that must be tensors, which YAML writes as lists."""
    try:
        parameters = inspect.signature(hydra.utils.get_object(path)).parameters
    except Exception:  # there is none, which instantiate explains, or it is written in C
        return []
    return [name for name, parameter in parameters.items() if "Tensor" in str(parameter.annotation)]


def _passed_on(node: Any, error: BaseException | None) -> list[str]:
    """The keys of `node` that a function with **arguments passed on, in the call of `error`, a TypeError."""
    if not isinstance(error, TypeError):
        return []
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    arguments = inspect.getargvalues(frame)
    call = traceback.extract_tb(error.__traceback__)[-1].line or ""
    if arguments.keywords is None or f"**{arguments.keywords}" not in call:
        return []
    return [name for name in arguments.locals[arguments.keywords] if name in node]


def instantiate_as(kind: type[Kind], node: DictConfig, key: str) -> Kind:
    """As `instantiate`, for the node `key`. Raises ConfigError if the object is no `kind`."""
    made = instantiate(node)
    if isinstance(made, kind):
        return made
    group = key.partition(".")[0]
    raise ConfigError(
        f"{key}._target_={node._target_} gives an object of {type(made).__name__}, and "
        f"{kind.__module__}.{kind.__qualname__} is wanted; type {group}=<an option in conf/{group}>"
    )
