"""The structure of the code: which package may import which, and that nothing is unpickled."""

import ast
import re

from support.commands import ROOT

SRC = ROOT / "src" / "lockstep"

# What each package may import besides itself, `errors` and what imports nothing of this project. `train.py` and the
# modules of EXEMPT may import everything.
PLAIN = {"compat", "errors", "files"}
ALLOWED = {name: set() for name in (*PLAIN, "config", "failures")} | {
    "distributed": {"failures"},
    "runs": {"failures"},  # reads and writes run folders for train.py and runs.py, without torch
    "sweeps": {"runs", "distributed", "failures"},  # a job of a sweep is a run
    "cli": {"modes", "sweeps", "runs", "config", "distributed", "launchers", "failures"},
    "launchers": {"runs", "distributed", "failures"},
    "data": {"distributed", "failures"},
    "models": {"distributed"},
    "tasks": {"data", "distributed"},
    "strategies": {"data", "models", "tasks", "distributed"},
    "loggers": {"training", "runs", "tasks", "data", "failures", "distributed"},  # they get its Run
    "training": {"loggers", "runs", "failures", "strategies", "data", "models", "tasks", "distributed"},
    "snapshots": {"failures", "training", "strategies", "data", "models", "tasks", "distributed"},
}
EXEMPT = ("build", "data.build", "modes", "sweeps.launch", "sweeps.search")
EXEMPT += ("launchers.rank_imports", "__init__", "__main__", "notebook")
# Beside their packages: what saves by the snapshots, which do not know it, and a strategy that has a step of its own.
ALSO = {"training.loop": "snapshots", "training.exchange": "snapshots", "strategies.async_server": "training"}
SCHEMA = "lockstep.config.schema"  # it imports nothing of this project but its errors
# How a value is typed, and what is recorded of a config, which all may import.
TEXT_OF_CONFIG = {"check", "check.flatten", "check.word", "record", "record.config_flags", "record.ConfigRecord"}
TEXT_OF_CONFIG |= {"record.RECORD", "record.sets"}
WITHOUT_TORCH = ("cli", "compat", "config", "errors", "files", "failures", "runs")
WITHOUT_TORCH += tuple(f"distributed.{name}" for name in ("environment", "host", "rendezvous", "run_folder", "signals"))
MODULES = {".".join(path.relative_to(SRC).with_suffix("").parts): path for path in sorted(SRC.rglob("*.py"))}


def imports(tree, top_level_only=False):
    names = set()
    for node in getattr(tree, "body", []) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_imports_point_one_way_and_the_command_line_needs_no_torch():
    for name, path in MODULES.items():
        package, tree = name.split(".")[0], ast.parse(path.read_text())
        if name.startswith(WITHOUT_TORCH):
            assert not [module for module in imports(tree, True) if module.split(".")[0] == "torch"], name
        if f"{name}.".startswith(tuple(f"{one}." for one in EXEMPT)):
            continue
        names = {one for one in imports(tree) if one.startswith("lockstep.")}
        if package != "config":  # a constructor says what its options accept in the words of this module
            names = {one for one in names if not one.startswith(SCHEMA) and one != "lockstep.config"}
            names -= {f"lockstep.config.{one}" for one in TEXT_OF_CONFIG}
        assert f"lockstep.{name}" != SCHEMA or names <= {"lockstep.errors", "lockstep.errors.ConfigError"}
        assert package != "snapshots" or not [one for one in names if one.startswith("lockstep.training.loop")]
        found = {one.split(".")[1] for one in names}
        assert found - ALLOWED[package] - PLAIN - {package, ALSO.get(name)} == set(), name


def test_no_test_file_imports_another_one():
    for path in (ROOT / "tests").rglob("test_*.py"):
        found = imports(ast.parse(path.read_text()))
        assert not [name for name in found if name.split(".")[-1].startswith("test_") or name == "conftest"], path


OBJECT_COLLECTIVE = re.compile(r"(gather|broadcast|scatter|send|recv)_object(_list)?$")
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


def test_nothing_is_unpickled():
    """A rank that unpickles what came over a wire, or from a file, runs whatever a stranger has put there."""
    for name, path in MODULES.items():
        nodes = [*ast.walk(tree := ast.parse(path.read_text()))]
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)} | imports(tree)
        assert not [one for one in names if one in PICKLES or OBJECT_COLLECTIVE.search(one)], name
        for call in nodes:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.load":
                assert "weights_only=True" in map(ast.unparse, call.keywords), name
