"""The Markdown pages of this repository, and the code in them."""

import re
from pathlib import Path

from support.commands import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACEHOLDER = re.compile(r"<|\.\.\.|\$|NAME")  # in a word that stands for something to fill in
_CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE_SPAN = re.compile(r"`([^`]+)`")
_COMMANDS = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """The page without its code blocks, and without the tables that a program has written."""
    text = _CODE_BLOCK.sub("", page.read_text())
    return text.partition("<!-- begin: lockstep.config")[0]


def code_spans(page: Path) -> list[str]:
    """What stands between single backticks."""
    return [" ".join(span.split()) for span in _CODE_SPAN.findall(prose(page))]


def command_lines(page: Path) -> list[str]:
    """The lines of the page's bash blocks, continued lines as one."""
    return "\n".join(_COMMANDS.findall(page.read_text())).replace("\\\n", " ").splitlines()
