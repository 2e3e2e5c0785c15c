"""Checks that a class or function named in the config exists and takes the keys beside its name.

It imports what the config names, so it runs where torch may be imported.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep.config.check import HYDRA_KEYS, Node, as_dict, join, nodes_with_target
from lockstep.config.fields import enumerate_words, show
from lockstep.config.renamed import renamed_key
from lockstep.config.schema import CONF
from lockstep.config.suggest import closest
from lockstep.config.targets import ForeignName, require_own_name
from lockstep.errors import ConfigError

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
PASSED_FIRST = {
    "optimizer": "the parameters of the model",
    "scheduler": "the optimizer",
    "scheduler.schedule": "the optimizer",
    "dataset.collate_fn": "the samples of a batch",
}
TRANSFORM = re.compile(r"dataset\.(test_)?transforms\[\d+\]")
OWN_PART = re.compile(r"task\.loss|task\.measures\.[^.]+")
PASSED_BY_NAME = {"scheduler": frozenset({"steps_per_epoch", "total_steps", "objective_mode"})}
# What build.py does not pass.
KEPT_BACK = {"optimizer": frozenset({"no_decay", "groups"})}
# Modules that a config may well name, and the package that has them. Another one that is missing is the user's own.
PACKAGES = {name: name for name in ("datasets", "einops", "kornia", "lightning", "monai", "timm", "torchaudio")}
PACKAGES |= {name: name for name in ("albumentations", "peft", "torchmetrics", "transformers", "webdataset")}
PACKAGES |= {"cv2": "opencv-python", "open_clip": "open_clip_torch", "sklearn": "scikit-learn"}
PACKAGES |= {"segmentation_models_pytorch": "segmentation-models-pytorch", "torch_geometric": "torch-geometric"}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_arguments(cfg: DictConfig, groups: Sequence[str] = CHECKED) -> None:
    """Raise ConfigError for a `_target_` that cannot be imported, or does not take the keys of its node."""
    config = as_dict(cfg)
    for group in groups:
        for key, node in nodes_with_target(config.get(group), group):
            target = locate(f"{key}._target_", node["_target_"], group)
            if key in PASSED_FIRST and not node.get("_partial_"):
                raise ConfigError(f"{key} is called later, with {PASSED_FIRST[key]}; type ++{key}._partial_=true")
            _check_signature(key, node, target)


def leave_out_untaken(cfg: DictConfig, words: Sequence[str]) -> list[str]:
    """Where `words` choose a `_target_`, remove from `cfg` what the option said for another one, and this one does not
    take: model._target_=my.Net needs no ~model.shape. Returns a line for each such node. Raises as `locate` does.

    words: the typed overrides. What they set stays, and is refused if nothing takes it.
    """
    typed = {word.partition("=")[0].lstrip("+~") for word in words}
    chosen = [key.removesuffix("._target_") for key in typed if key.endswith("._target_")]
    lines = []
    for key in sorted(chosen):
        node = OmegaConf.select(cfg, key)
        group = key.partition(".")[0]
        if group not in CHECKED or not isinstance(node, DictConfig):
            continue
        parameters = _parameters(locate(f"{key}._target_", node["_target_"], group))
        if parameters is None or _takes_any_name(parameters):
            continue
        said = set(node) - HYDRA_KEYS - KEPT_BACK.get(key, frozenset()) - {name.rpartition(".")[2] for name in typed}
        untaken = sorted(map(str, said - set(parameters)))
        for name in untaken:
            del node[name]
        if untaken:
            lines.append(f"{key}: {node['_target_']} takes no {enumerate_words(untaken, 'or')}; left out")
    return lines


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
            _import_submodule(found.__name__, name, place)
        found = getattr(found, name)
        require_own_name(path, place, found)
    return found


def _import_submodule(parent: str, name: str, path: str) -> None:
    try:
        importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        message = f"module {parent!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[parent]) from None


def _check_signature(key: str, node: Node, target: Callable[..., Any]) -> None:
    parameters = _parameters(target)
    if parameters is None:
        return
    given = set(node) - HYDRA_KEYS - KEPT_BACK.get(key, frozenset())
    by_position = len(node.get("_args_") or ()) + (key in PASSED_FIRST)
    filled = set(list(_positional(parameters))[:by_position])
    unknown = [name for name in node if name in given and (name not in parameters or name in filled)]
    if unknown and not (_takes_any_name(parameters) and not set(unknown) & filled):
        raise ConfigError(_unknown_sentence(key, node, unknown, sorted(set(parameters) - given - filled)))
    filled |= given | PASSED_BY_NAME.get(key, frozenset())
    missing = [name for name, parameter in parameters.items() if _is_required(parameter) and name not in filled]
    if missing and (not node.get("_partial_") or key in PASSED_FIRST):
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
    renamed = renamed_key(join(key, name), show(node[name]))
    if renamed is not None:
        return renamed
    meant = closest(name, free)
    if len(unknown) == 1 and meant is not None:
        return f"{sentence}; type +{join(key, meant)}={show(node[name])}"
    removed = " ".join(f"~{join(key, item)}" for item in unknown)
    return f"{sentence}; type {removed}, or {_options(key.partition('.')[0])}"


def _options(group: str) -> str:
    folder = CONF / group
    return f"{group}=<an option in conf/{group}>" if folder.is_dir() else f"another {group}"


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """None if Python cannot tell, as for functions written in C."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None


def _positional(parameters: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    return (name for name, parameter in parameters.items() if parameter.kind in _POSITIONAL)


def _takes_any_name(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _is_required(parameter: inspect.Parameter) -> bool:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in variable
