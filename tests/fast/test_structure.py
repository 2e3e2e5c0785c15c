"""The structure of the code: which package may import which, and that nothing is unpickled."""

import ast
import re
from pathlib import Path

import pytest

from support.commands import ROOT

SRC = ROOT / "src" / "lockstep"
TESTS = ROOT / "tests"

# What each package may import besides itself. `train.py` and the modules of EXEMPT may import everything.
ALLOWED: dict[str, set[str]] = {
    "text": set(),
    "errors": set(),
    "compat": {"errors"},
    "files": set(),
    "source_code": set(),
    "config": {"errors"},
    "failures": {"errors"},
    "distributed": {"failures", "errors"},
    "runs": {"failures", "errors"},  # reads and writes run folders for train.py and runs.py, without torch
    "sweeps": {"runs", "distributed", "failures", "errors"},  # a job of a sweep is a run
    "cli": {"modes", "sweeps", "runs", "config", "distributed", "launchers", "failures", "errors"},
    "launchers": {"runs", "distributed", "failures", "errors"},
    "data": {"distributed", "failures", "errors"},
    "models": {"distributed", "errors"},
    "tasks": {"data", "distributed", "errors"},
    "strategies": {"data", "models", "tasks", "distributed", "errors"},
    "loggers": {"training", "runs", "tasks", "data", "failures", "distributed", "errors"},  # they get its Run
    "training": {"loggers", "runs", "failures", "strategies", "data", "models", "tasks", "distributed", "errors"},
    "snapshots": {"failures", "training", "strategies", "data", "models", "tasks", "distributed", "errors"},
}
EXEMPT = ("build", "data.build", "modes", "preflight", "sweeps.jobs", "sweeps.launch", "sweeps.search")
EXEMPT += ("launchers.rank_imports", "__init__", "__main__", "notebook")
SCHEMA = "lockstep.config.schema"  # it imports nothing of this project but its errors
# How a value is typed, and what is recorded of a config, which all may import.
TEXT_OF_CONFIG = {"check", "check.flatten", "check.word", "record", "record.config_flags", "record.ConfigRecord"}
TEXT_OF_CONFIG |= {"record.RECORD", "record.sets"}
PLAIN = {"compat", "files", "text", "source_code"}  # they import nothing of this project
WITHOUT_TORCH = ["cli", "compat", "config", "errors", "files", "text", "failures", "runs", "sweeps"]
WITHOUT_TORCH += ["distributed.environment", "distributed.host", "distributed.rendezvous"]
WITHOUT_TORCH += ["distributed.run_folder", "distributed.signals"]
MODULES = sorted(SRC.rglob("*.py"))


def package_of(name: str) -> str:
    """ "lockstep.data.loader" -> "data"."""
    return name.split(".")[1]


def module_name(path: Path) -> str:
    return ".".join(["lockstep", *path.relative_to(SRC).with_suffix("").parts])


def imports(tree: ast.AST, top_level_only: bool = False) -> set[str]:
    """The names of all imported modules."""
    nodes = getattr(tree, "body", []) if top_level_only else ast.walk(tree)
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    package = package_of(module_name(path) + ".")
    name = module_name(path).removeprefix("lockstep.")
    if any(f"{name}.".startswith(f"{one}.") for one in EXEMPT):
        return
    names = {name for name in imports(ast.parse(path.read_text())) if name.startswith("lockstep.")}
    if package != "config":  # a constructor says what its options accept in the words of this module
        names = {name for name in names if not name.startswith(SCHEMA) and name != "lockstep.config"}
        names -= {f"lockstep.config.{name}" for name in TEXT_OF_CONFIG}
    assert module_name(path) != SCHEMA or names <= {"lockstep.errors", "lockstep.errors.ConfigError"}
    found = {package_of(name) for name in names}
    if name in ("training.loop", "training.exchange"):  # they save by the snapshots, which do not know them
        found -= {"snapshots"}
    if name == "strategies.async_server":  # has a step of its own
        found -= {"training"}
    assert package != "snapshots" or not [name for name in names if name.startswith("lockstep.training.loop")]
    assert found - ALLOWED[package] - PLAIN - {package} == set()


def test_the_command_line_imports_no_torch() -> None:
    for path in MODULES:
        name = module_name(path).removeprefix("lockstep.")
        if name.startswith(tuple(WITHOUT_TORCH)):
            found = imports(ast.parse(path.read_text()), top_level_only=True)
            assert not [module for module in found if module.split(".")[0] == "torch"], name


def test_no_test_file_imports_another_one() -> None:
    for path in TESTS.rglob("test_*.py"):
        found = imports(ast.parse(path.read_text()))
        assert not [name for name in found if name.split(".")[-1].startswith("test_") or name == "conftest"], path


OBJECT_COLLECTIVE = re.compile(r"(gather|broadcast|scatter|send|recv)_object(_list)?$")
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_nothing_is_unpickled(path: Path) -> None:
    """A rank that unpickles what came over a wire, or from a file, runs whatever a stranger has put there."""
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | imports(tree)
    assert not list(filter(OBJECT_COLLECTIVE.search, names))
    assert not names & PICKLES
    for call in calls:
        if ast.unparse(call.func) == "torch.load":
            assert "weights_only=True" in map(ast.unparse, call.keywords)
