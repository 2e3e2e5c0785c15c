"""The project without some of its files: python deleted.py '{"what goes": ["src/lockstep/...", "conf/..."]}' prints {what goes: what fails}.

Each copy is tried in a fork of this process, which has imported the libraries and nothing of this project.
"""

import importlib
import json
import os
import runpy
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

# ruff: noqa: F401
import hydra
import pandas
import pydantic.type_adapter
import scipy.stats
import sklearn.datasets
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.utils.tensorboard
import torchmetrics
import torchvision.transforms.v2

ROOT = Path(__file__).parents[2]
ENTRIES = ("train", "runs", "lockstep.__main__")


def failure_without(paths: list[str]) -> str:
    """What a project without these files and folders prints, if a module does not import or two steps do not train."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("src", "conf"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "local", "mine*"))
        for path in paths:
            target = folder / path
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            _become(folder)
        os.close(writer)
        with os.fdopen(reader, errors="replace") as output:
            said = output.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return said if code else ""


def _become(folder: Path) -> None:
    """Turn this fork into the command of the copy. Never returns."""
    os.chdir(folder)
    sys.path[0] = str(folder / "src")
    sys.argv = [str(folder / "src/train.py"), "trainer.max_steps=2", "hydra.run.dir=run"]
    try:
        for file in sorted((folder / "src").rglob("*.py")):
            module = ".".join(file.relative_to(folder / "src").with_suffix("").parts).removesuffix(".__init__")
            if module not in ENTRIES:
                importlib.import_module(module)
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    failures = {what: failure_without(paths) for what, paths in json.loads(sys.argv[1]).items()}
    print(json.dumps({what: said for what, said in failures.items() if said}))
