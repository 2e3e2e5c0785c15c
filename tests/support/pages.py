"""The Markdown pages of this repository, and the code in them."""

import os
import re
import sys
from pathlib import Path

from support.commands import ROOT, TRAIN
from support.forked import can_be_forked, python_in

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACEHOLDER = re.compile(r"<|\.\.\.|\$|NAME")  # in a word that stands for something to fill in
_CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE_SPAN = re.compile(r"`([^`]+)`")
COMMANDS = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FILES = re.compile(r"```(?:python|yaml)\n((?:# @package _global_\n)?# (?:my_work|conf)/.*?)```", re.DOTALL)
_FILE = re.compile(r"^(# @package _global_\n)?# ((?:my_work|conf)/\S+)\n", re.MULTILINE)


def prose(page):
    return _CODE_BLOCK.sub("", page.read_text())


def code_spans(page):
    return [" ".join(span.split()) for span in _CODE_SPAN.findall(prose(page))]


def command_lines(page):
    return "\n".join(COMMANDS.findall(page.read_text())).replace("\\\n", " ").splitlines()


def section(page, heading):
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def example_files(text):
    """[(path, content)] of the examples that begin with their path, such as `# my_work/model.py`, also several a block.

    Hydra reads a package from the first line of a file only, so it stands above the path.
    """
    found = []
    for block in _FILES.findall(text):
        _, *pieces = _FILE.split(block)
        found += [(path, (package or "") + content) for package, path, content in zip(*[iter(pieces)] * 3, strict=True)]
    return found


def copy_examples(page, home):
    """Fill a home folder: mywork/, with every file of the page, and lockstep/, with this repository's sources."""
    for name, text in example_files(page):
        path = home / "mywork" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (home / "lockstep").mkdir()
    for folder in ("src", "conf"):
        (home / "lockstep" / folder).symlink_to(ROOT / folder)


def environment(home):
    """Of a shell in which the commands of a page are typed: `~` is `home`, and `python src/train.py` starts soon."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if can_be_forked([sys.executable, TRAIN], {}):
        path = f"{python_in(home / 'bin')}:{path}"
    return {"HOME": home, "PATH": path, "LOCKSTEP_DATA": home / "data"}  # decoded images go there


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
