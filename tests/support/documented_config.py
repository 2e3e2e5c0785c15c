"""docs/configuration.md: the tables between its two marker comments. Run as a program, it writes them again."""

from lockstep import cli
from lockstep.config.documentation import documentation
from support.commands import ROOT

PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- begin: lockstep.config.documentation -->\n", "<!-- end -->\n"


def page_with_current_tables() -> str:
    """The page as it should be."""
    cli.register_resolvers()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{documentation()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_current_tables())
