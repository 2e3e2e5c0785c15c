"""Which code and which packages a run used."""

import hashlib
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.source_code import DIGITS, PARTS, ROOT, hash_of_source, module_hashes

PACKAGES = ("torch", "torchvision", "numpy", "hydra-core", "omegaconf", "tensorboard", "tqdm", "scikit-learn")
DIFF = "uncommitted.diff"
LARGEST_DIFF = 2**18  # bytes; of a longer one only its hash is kept
NAMED = 50  # untracked files in a record
GIT_SECONDS = 30.0


@cache
def versions() -> dict[str, str]:
    """{"python": "3.11.2", "torch": ...} of this process, without importing anything."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def code_facts(root: Path = ROOT) -> tuple[dict[str, Any], bytes]:
    """(facts for run.json, the uncommitted diff of src/ and conf/ or nothing). Takes some ms.

    The facts are "source", a hash of src/ and conf/, "modules", those of the user, and where git knows these folders
    "commit", "diff_sha256", "diff_bytes" and "untracked", a list of files.
    """
    facts: dict[str, Any] = {"source": hash_of_source(root), "modules": module_hashes(users_only=True)}
    commit = _git(root, "rev-parse", "HEAD", "HEAD:./src")
    if commit is None:  # no git, no repository, or one that does not have this folder
        return facts, b""
    changes = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *PARTS) or b""
    status = changes.decode(errors="replace").splitlines()
    untracked = [line[3:] for line in status if line.startswith("??")]
    facts |= {"commit": commit.decode().split()[0], "untracked": untracked[:NAMED]}
    if len(status) == len(untracked):
        return facts, b""
    diff = _git(root, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", *PARTS) or b""
    facts |= {"diff_sha256": hashlib.sha256(diff).hexdigest()[:DIGITS], "diff_bytes": len(diff)}
    return facts, diff if len(diff) <= LARGEST_DIFF else b""


@cache
def loaded_code_facts() -> tuple[dict[str, Any], bytes]:
    """`code_facts` when this process asked first: it had loaded the code by then, and so have its forks.

    The user's modules may be loaded later.
    """
    return code_facts()


def _git(root: Path, *words: str) -> bytes | None:
    """What git prints, None if it cannot answer. It takes no lock: another git may work in the same folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        answer = subprocess.run(
            ["git", *words],
            cwd=root,
            env=kept | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout if answer.returncode == 0 else None
