"""Checks of a composed config: of its sections before anything is imported, of its classes and their options after."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from lockstep.compat import register_resolver
from lockstep.config.schema import (
    DATASETS,
    GROUPS,
    SECTIONS,
    Node,
    Rule,
    Run,
    Text,
    as_dict,
    as_number,
    default_of,
    enumerate_words,
    flatten,
    join,
    node_at,
    node_in_conf,
    nodes_with_target,
    option_rules,
    rules,
    rules_of_readers,
    section_rules,
    show,
    with_values,
)
from lockstep.config.suggest import (
    NOT_ON_CONFIG,
    OTHER_NAMES,
    TASKS_OF_LOSSES,
    closest,
    removed_key,
    unknown_key,
    value_for_section,
    without_package,
)
from lockstep.config.targets import CHECKED, check_signature, locate
from lockstep.errors import ConfigError

NEEDED_GROUPS = ("model", "dataset", "optimizer", "scheduler", "strategy", "gradient_sync", "task", "launch", "mode")
ALL_SECTIONS = ("", "dataset", *SECTIONS)
FOLDERS: tuple[str, ...] = ("data_dir", "resume", "init", "run_dir")
FOLDERS += ("dataset.root", "dataset.path", "dataset.csv_file", "dataset.test_csv_file", "dataset.cache_dir")
# {an optimizer of torch: (what it needs that no training here gives it, what to type instead)}.
UNFIT = {
    "torch.optim.LBFGS": ("computes the loss again and again in a step", "optimizer=adamw"),
    "torch.optim.SparseAdam": ("needs sparse gradients", "optimizer=adamw"),
    "torch.optim.Muon": ("is for matrices only", "optimizer=muon, which leaves the other parameters to AdamW"),
}


# ---- Sections, without an import of what the config names


def with_whole_folders(cfg: DictConfig, hydra_cfg: HydraConf) -> DictConfig:
    """`cfg` with ~ as the home folder, and with folders that mean the same where hydra.job.chdir=true makes the run's
    folder the current one."""
    typed = {key: OmegaConf.select(cfg, key) for key in FOLDERS}
    paths = {key: Path(path).expanduser() for key, path in typed.items() if isinstance(path, str)}
    if hydra_cfg.job.chdir:
        paths = {key: Path(hydra_cfg.runtime.cwd, path) for key, path in paths.items()}
    changed = {key: str(path) for key, path in paths.items() if hydra_cfg.job.chdir or typed[key].startswith("~")}
    return with_values(cfg, changed) if changed else cfg


def as_declared(config: Node) -> Node:
    """A composed config with the values of its sections as their rules declare them, changed in place.

    A whole number becomes a float where one is declared, the number in an environment variable a number, and
    {watch: {weights: off}} of a YAML file "off".
    """
    for section in ALL_SECTIONS:
        node = node_at(config, section)
        if isinstance(node, dict):
            for name, rule in section_rules(config, section).items():
                if name in node:
                    node[name] = rule.as_declared(rule.from_text(rule.as_declared(node[name])))
    return config


def check_config(cfg: DictConfig | Node) -> None:
    """Check what the values of the sections show alone. Raises ConfigError for the first that cannot work."""
    config = as_dict(cfg)
    _check_sections(config)
    for section in ALL_SECTIONS:
        node = node_at(config, section)
        for name, rule in section_rules(config, section).items():
            check_value(join(section, name), node[name], rule)
    _check_dataset(config["dataset"])
    _check_validation(config)
    _check_tokens(config)
    optimizer, schedules = config["optimizer"]["_target_"], nodes_with_target(config["scheduler"])
    if optimizer in UNFIT:
        problem, advice = UNFIT[optimizer]
        raise ConfigError(f"optimizer._target_={optimizer} {problem}; type {advice}")
    if any(node["_target_"].endswith("lr_scheduler.ReduceLROnPlateau") for _, node in schedules):
        raise ConfigError("ReduceLROnPlateau is stepped with the result of an evaluation; type scheduler=plateau")
    loggers = config.get("logger", {})  # logger=[] leaves no section
    for key, node in loggers.items() if isinstance(loggers, dict) else [("", loggers)]:
        if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
            raise ConfigError(
                f"{join('logger', key)}={show(node)} is no logger; type logger=[] or logger=[console,csv]"
            )


def check_value(key: str, value: object, rule: Rule, default: object = None) -> None:
    """Raise ConfigError if `rule` does not accept the value of `key`. default: its value in conf/."""
    if rule.accepts(value):
        return
    number = as_number(value) if rule.is_number else None
    if number is not None and rule.accepts(number):
        decoded = f"""'{key}="${{oc.decode:${{oc.env:NAME}}}}"'"""
        raise ConfigError(
            f'{key}="{value}" is text, and must be {rule.must_be}; type {key}={show(number)}, or {decoded} for the '
            f"number in an environment variable"
        )
    raise ConfigError(wrong_value(key, value, rule, default))


def wrong_value(key: str, value: object, rule: Rule, default: object = None) -> str:
    """The sentence for a value that `rule` does not accept."""
    shown = str(value) if isinstance(value, float) and float not in rule.kinds else show(value)  # 2.0, where 2 is right
    if key == "task.loss" and str(value).lower() in TASKS_OF_LOSSES:
        return f"{key}={shown} must be {rule.must_be}; type task={TASKS_OF_LOSSES[str(value).lower()]}"
    default = default_of(key) if default is None else default
    return f"{key}={shown} must be {rule.must_be}; type {rule.what_to_type(key, value, default)}"


def _check_sections(config: Node) -> None:
    """`~key`, `key=value` for a whole section, and `+key` can change what the composition guarantees."""
    for name in ("experiment", "local"):
        if config.get(name):
            raise ConfigError(without_package(name))
    if len(SECTIONS.keys() - config.keys()) > len(SECTIONS) // 2:
        raise ConfigError(NOT_ON_CONFIG)
    for name in (*SECTIONS, *NEEDED_GROUPS):
        node = node_at(config, name)
        if node is None and name != "dataset.augment":
            raise ConfigError(removed_key(name))
        if not isinstance(node, dict):
            raise ConfigError(value_for_section(name, show(node)))
        target = node.get("_target_")
        if name in NEEDED_GROUPS and name != "dataset" and not (isinstance(target, str) and target):
            raise ConfigError(f"{name}._target_ names no class; type {name}=<an option in conf/{name}>")
    for section in ALL_SECTIONS:
        for key in section_rules(config, section):
            if key not in node_at(config, section):
                raise ConfigError(removed_key(join(section, key)))
    keys = [key for key in flatten(config) if key.partition(".")[0] in (*SECTIONS, *NEEDED_GROUPS)]
    for section in SECTIONS:
        known = section_rules(config, section)
        for key, value in node_at(config, section).items():
            if key not in known:
                others = [other for other in keys if other != join(section, key)]
                raise ConfigError(unknown_key(join(section, key), show(value), others, {}))


def _check_dataset(dataset: Node) -> None:
    """Both halves have a reader, and mean and std have one number for each channel."""
    for half in ("train", "test"):
        reader = dataset.get(half)
        if half == "test" and reader is None:
            raise ConfigError(
                "dataset.test=null leaves nothing to evaluate, and every run is evaluated; "
                "type dataset.test='${dataset.train}' to evaluate the training data"
            )
        if not isinstance(reader, dict) or "_target_" not in reader:
            raise ConfigError(
                f"dataset.{half}={show(reader)} reads no data; type dataset=<an option in conf/dataset>, "
                f"or +dataset.{half}._target_=<module>.<class>"
            )
    shape, augment = dataset["shape"], dataset["augment"]
    if shape is not None and len(shape) != 3 and (augment["pad"] or augment["flip"] or augment["sizes"]):
        raise ConfigError(
            f"dataset.augment is for images, and the samples have the shape {show(shape)}; "
            f"type dataset.augment.pad=0 dataset.augment.flip=false dataset.augment.sizes=null"
        )
    if shape is None or len(shape) != 3:
        return
    for name in ("mean", "std"):
        values, channels = dataset[name], shape[0]
        if values is not None and len(values) != channels:
            raise ConfigError(
                f"dataset.{name}={show(values)} must be a list of {channels}, one number for each channel of images of "
                f"shape {show(shape)}; type dataset.{name}={show([0.5] * channels)} or dataset.{name}=null"
            )


def _check_validation(config: Node) -> None:
    """What is held out can be, and the set that decides is there."""
    dataset, objective, test = config["dataset"], config["objective"], config["evaluation"]["test"]
    size, folds, fold = dataset["validation"], dataset["folds"], dataset["fold"]
    if isinstance(size, float) and size > 1 and not size.is_integer():
        raise ConfigError(
            f"dataset.validation={size} is neither a share below 1 nor a whole number of samples; "
            f"type dataset.validation={int(size)}, or dataset.validation=0.1"
        )
    if folds is not None and fold is None:
        raise ConfigError(
            f"dataset.folds={folds} and no fold is chosen; type dataset.fold=0, or for all of them "
            f"-m dataset.folds={folds} 'dataset.fold=range(0,{folds})'"
        )
    if fold is not None and (folds is None or fold >= folds):
        there_are = "there are none" if folds is None else f"the folds are 0 to {folds - 1}"
        raise ConfigError(f"dataset.fold={fold} and {there_are}; type dataset.folds={max(2, fold + 1)}")
    if folds is not None and isinstance(size, dict):
        raise ConfigError(
            f"dataset.folds={folds} holds out a part of the training data, and dataset.validation reads other data; "
            f"type dataset.validation=null, or leave dataset.folds out"
        )
    has_validation = size is not None or folds is not None
    if config["trainer"]["final"] is not None:
        _check_final(config, has_validation)
    if objective.startswith("val/") and not has_validation:
        raise ConfigError(
            f"objective={objective} needs a validation set, and there is none; type dataset.validation=0.1, or "
            f"objective=test/{objective.removeprefix('val/')}"
        )
    if test == "never" and objective.startswith("test/"):
        raise ConfigError(
            f"evaluation.test=never leaves objective={objective} unread; type evaluation.test=end, or "
            f"{'leave objective out' if has_validation else 'dataset.validation=0.1'}"
        )


def _check_final(config: Node, has_validation: bool) -> None:
    """A training on all data, where nothing is chosen: it has no use for what follows evaluations."""
    final, objective = f"trainer.final={config['trainer']['final']}", config["objective"]
    plateau = config["scheduler"]["_target_"] == "lockstep.training.schedulers.Plateau"
    halving = config["sweep"]["search"] == "halving"
    unused = [
        ("sweep.search", "halving" if halving else "list", "list"),
        ("objective", objective, objective.replace("val/", "test/")),
        ("trainer.pause_after", config["trainer"]["pause_after"], None),
        ("evaluation.patience", config["evaluation"]["patience"], None),
        ("evaluation.test", config["evaluation"]["test"], "end"),
        ("scheduler", "plateau" if plateau else "cosine", "cosine"),
    ]
    for key, value, needed in unused:
        if value != needed:
            raise ConfigError(
                f"{key}={value} needs more evaluations than the one at the end of {final}; type {key}={show(needed)}"
            )
    if not has_validation or isinstance(config["dataset"]["validation"], dict):
        there_is = "there is none" if not has_validation else "dataset.validation reads other data"
        raise ConfigError(
            f"{final} trains on what is held out of the training data, and {there_is}; type trainer.final=null"
        )


def _check_tokens(config: Node) -> None:
    """A model that reads token numbers gets them, and no other model of this project does."""
    reads_tokens = config["model"]["_target_"] == "lockstep.models.gpt.gpt"
    data = DATASETS.get(config["dataset"]["train"]["_target_"])
    if data is None or not _is_own(config["model"]) or reads_tokens == (data is Text):
        return
    if data is Text:
        raise ConfigError("dataset=text has token numbers, which this model does not read; type model=gpt")
    raise ConfigError("model=gpt reads token numbers, which this data set does not have; type dataset=text")


def _is_own(node: Node) -> bool:
    """Whether the node names a class or function of this project."""
    return str(node["_target_"]).startswith("lockstep.")


# ---- Classes and their options, which are imported


def check_arguments(cfg: DictConfig, groups: Sequence[str] = CHECKED) -> None:
    """Check what the config names: that it exists, takes the keys of its node, and accepts their values.

    Values for classes of the user's own are passed on unchecked. Raises ConfigError.
    """
    config = as_dict(cfg)
    for group in groups:
        found = {
            key: locate(f"{key}._target_", node["_target_"], group)
            for key, node in nodes_with_target(config.get(group), group)
        }
        if group == "dataset":
            _check_values("dataset", config[group], rules_of_readers(config[group], found), config[group])
        for key, node in nodes_with_target(config.get(group), group):
            check_signature(key, node, found[key])
            _check_values(key, node, option_rules(key, node["_target_"], found[key]), node)
    if groups is CHECKED:
        _check_called(config)
        _check_model_fits_data(config["model"], config["dataset"])
        _check_task(config)
        _check_optimizer(config["optimizer"])


def _check_values(key: str, node: Node, known: Mapping[str, Rule], named: Node) -> None:
    for name, rule in known.items():
        if name in node:
            value = rule.as_declared(node[name])
            if not rule.accepts(value):
                default = node_in_conf(key, str(named.get("_target_"))).get(name)
                check_value(join(key, name), value, rule, default)


def _check_called(config: Node) -> None:
    """What is called has a `_target_`: a node without one stays a dict, or is left out without a word."""
    dataset, task = config["dataset"], config["task"]
    nodes = {f"dataset.{name}": dataset[name] for name in ("prepare", "collate_fn")}
    for name in ("transforms", "test_transforms", "batch_transforms"):
        nodes |= {f"dataset.{name}[{index}]": node for index, node in enumerate(dataset[name])}
    if _is_own(task):
        nodes["task.loss"] = task.get("loss")
        nodes |= {f"task.measures.{name}": node or {} for name, node in task.get("measures", {}).items()}
    for key, node in nodes.items():
        if node is not None and not (isinstance(node, dict) and node.get("_target_")):
            typed = f"_target_:<module>.<class> in {key}" if "[" in key else f"++{key}._target_=<module>.<class>"
            raise ConfigError(f"{key}={show(node)} names no class or function; type {typed}")


def _check_model_fits_data(model: Node, dataset: Node) -> None:
    """A model of this project takes the samples of the data set, and has an output for each of its classes."""
    if not _is_own(model) or not {"shape", "classes"} <= model.keys() & dataset.keys():
        return
    if model["shape"] != dataset["shape"]:
        raise ConfigError(
            f"model.shape={show(model['shape'])} does not fit dataset.shape={show(dataset['shape'])}; "
            f"type model.shape={show(dataset['shape'])}"
        )
    if None not in (model["classes"], dataset["classes"]) and model["classes"] < dataset["classes"]:
        raise ConfigError(
            f"model.classes={model['classes']} is less than dataset.classes={dataset['classes']}; "
            f"type model.classes={dataset['classes']}"
        )


LANGUAGE_MODELLING = "lockstep.tasks.language_modelling.LanguageModelling"
OF_LANGUAGE_MODELLING = ("loss", "perplexity")


def _check_task(config: Node) -> None:
    """The keys of a task of this project fit each other and the data set, and none would change nothing."""
    task = config["task"]
    if not _is_own(task):
        return
    metrics = task["metrics"]
    if "loss" not in metrics:
        raise ConfigError("task.metrics has no loss, which every run reports; type ++task.metrics.loss=min")
    for name, mode in metrics.items():
        key = f"task.metrics.{name}"
        if mode not in ("min", "max"):
            raise ConfigError(f"{key}={show(mode)} must be min or max; type {key}=min or {key}=max")
        if task["_target_"] == LANGUAGE_MODELLING and name not in OF_LANGUAGE_MODELLING:
            known = " and ".join(OF_LANGUAGE_MODELLING)
            raise ConfigError(
                f"{key} is not measured by this task, which has {known}; leave it out, or type task=<an option in "
                f"conf/task>"
            )
    smoothing = task.get("label_smoothing")
    if task.get("loss") and smoothing:
        raise ConfigError(
            f"task.label_smoothing={smoothing} is of the task's own loss, which task.loss replaces; "
            f"type task.label_smoothing=0, and ++task.loss.label_smoothing={smoothing} if your loss takes it"
        )
    for name in task.get("measures") or {}:
        if name not in metrics:
            raise ConfigError(
                f"task.measures.{name} is not in task.metrics, which says whether more is better; "
                f"type +task.metrics.{name}=max or +task.metrics.{name}=min"
            )
    classes, known_classes = task.get("classes"), config["dataset"].get("classes")
    if None not in (classes, known_classes) and classes < known_classes:
        raise ConfigError(
            f"task.classes={classes} is less than dataset.classes={known_classes}; type task.classes={known_classes}"
        )


def _check_optimizer(node: Node) -> None:
    """Hyperparameters do not contradict each other, and each group has a match and values that are accepted."""
    target = node["_target_"]
    if target == "torch.optim.SGD" and node.get("nesterov") and not node.get("momentum"):
        raise ConfigError("optimizer.nesterov=true needs a momentum above 0; type optimizer.momentum=0.9")
    known = option_rules("optimizer", target, locate("optimizer._target_", target, "optimizer"))
    for group in node.get("groups") or ():
        patterns = group.get("match")
        listed = patterns if isinstance(patterns, list) else [patterns]
        if not listed or not all(isinstance(pattern, str | int) for pattern in listed):
            example = "optimizer.groups=[{match:fc,lr:0.1}]"
            raise ConfigError(f"optimizer.groups: {show(group)} says no match, the parameters' name; type {example}")
        for name, value in group.items():
            rule = known.get(name)
            if rule is not None and not rule.accepts(rule.as_declared(value)):
                example = show(rule.example(node_in_conf("optimizer", target).get(name)))
                raise ConfigError(
                    f"optimizer.groups: {name}={show(value)} must be {rule.must_be}; "
                    f"type optimizer.groups=[{{match:{show(patterns)},{name}:{example}}}]"
                )


# ---- What was typed, and nothing reads


GROUPS_AND_SECTIONS = {*GROUPS, *SECTIONS}
READ = {*GROUPS_AND_SECTIONS, *rules(Run), "local", "experiment"}


def check_unread_overrides(cfg: DictConfig, values: Node, hydra_cfg: HydraConf) -> None:
    """Raise ConfigError for an unread key that stands for another: +epochs=3 for trainer.epochs=3.

    cfg: with its interpolations. values: of `cfg`, resolved. A key of the user's own, such as a tag, is left alone.
    """
    keys = list(flatten(values))
    names = {key.rpartition(".")[2] for key in keys if key.partition(".")[0] in GROUPS_AND_SECTIONS}
    for key, value in _unread(cfg, hydra_cfg).items():
        top, dot, _ = key.partition(".")
        same_letters = any(sorted(top) == sorted(other) for other in GROUPS_AND_SECTIONS)
        # A label such as task_id or data is not close enough.
        is_misspelled = same_letters or closest(top, GROUPS_AND_SECTIONS, similarity=0.88) is not None
        is_name = key in names and key != "name"  # which is a label of the run, and no backend.name
        if is_misspelled or (not dot and (is_name or key in OTHER_NAMES)):
            others = [other for other in keys if other != key]
            raise ConfigError(unknown_key(key, value, others, {}))


def notice_of_unread_overrides(cfg: DictConfig, hydra_cfg: HydraConf) -> str:
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


# ---- Values that environment variables decide, and the columns by which runs are compared


RESOLVER = "oc.env"


def values_as_written(cfg: DictConfig) -> dict[str, str]:
    """{key: its text} of the values that an environment variable decides, directly or by another key.

    cfg: as composed, with its interpolations.
    """
    written = flatten(OmegaConf.to_container(cfg, resolve=False))
    asked: list[Any] = []

    def read(*arguments: Any) -> Any:
        asked.append(arguments[0])
        return oc.env(*arguments)

    decided = {}
    register_resolver(RESOLVER, read)
    try:
        for key, text in written.items():
            if "${" in str(text):
                before = len(asked)
                with suppress(OmegaConfBaseException):  # `resolve` says what is wrong with it
                    found = OmegaConf.select(cfg, key)
                    if OmegaConf.is_config(found):
                        OmegaConf.to_container(found, resolve=True)
                if len(asked) > before:
                    decided[key] = str(text)
    finally:
        register_resolver(RESOLVER, oc.env)
    return decided


def as_written(flat: Mapping[str, Any], written: Mapping[str, str]) -> dict[str, Any]:
    """A flat config in which the values of `written`, and what is below their keys, are text."""
    shown = dict(flat)
    for key in flat:
        for prefix, text in written.items():
            if key == prefix or key.startswith(f"{prefix}."):
                shown[key] = text
    return shown


# Where a run is, and how it was started: not what it computes.
LEFT_OUT = {"run_dir", "data_dir", "resume", "local", "mode", "backend", "trainer.pause_after"}
LEFT_OUT_BELOW = ("launch", "logger", "mode.", "backend.", "sweep.")
LEFT_OUT_NAMES = ("._target_", "._partial_", "sync_bn.mode")  # the option's name says it

Column = bool | int | float | str


def run_columns(flat: Mapping[str, Any], options: Mapping[str, str | None], world_size: int) -> dict[str, Column]:
    """{key: value} of a run: the options of the config groups, such as model, all keys, and the number of ranks.

    flat: the config by full keys. options: {config group: option or class}. Numbers stay numbers; lists become text. A
    key that is null is left out: TensorBoard would show all its values as text.
    """
    columns = {group: option for group, option in options.items() if "/" not in group} | dict(flat)
    columns["world_size"] = world_size
    return {
        key: value if isinstance(value, bool | int | float | str) else show(value)
        for key, value in columns.items()
        if value is not None
        and key not in LEFT_OUT
        and not key.startswith(LEFT_OUT_BELOW)
        and not key.endswith(LEFT_OUT_NAMES)
    }
