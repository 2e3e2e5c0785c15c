"""What the runs in a folder were, and how they compare. It trains nothing itself.

python src/runs.py table outputs --sort objective --filter optimizer.lr=0.1
python src/runs.py compare outputs/multirun/a optimizer.lr=0.1 optimizer.lr=0.01
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterable
from typing import NoReturn

from lockstep.errors import EXIT_CONFIG, EXIT_FINISHED, EXIT_INTERRUPTED, ConfigError


class Parser(argparse.ArgumentParser):
    """An error is one sentence that ends in what to type."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; type {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="python src/runs.py", description="Lists runs and compares them.")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    table = verbs.add_parser("table", help="the runs below the folders, those of one setting in one line")
    table.add_argument("folders", nargs="*", default=["outputs"], metavar="FOLDER", help="default: outputs")
    table.add_argument("--sort", default="date", metavar="KEY", help="a column or a config key; default: date")
    table.add_argument("--reverse", action="store_true", help="turn the order round")
    table.add_argument("--filter", action="append", default=[], metavar="KEY=VALUE", help="may be repeated")
    table.add_argument("--each", action="store_true", help="a line for each run, also of those that differ in seed")
    table.add_argument("--columns", metavar="A,B", help="columns and config keys, with commas between them")
    compare = verbs.add_parser("compare", help="which of two settings is better, and how sure that is")
    sides = "two folders or patterns; or folders and two settings: optimizer.lr=0.1 'optimizer.lr=0.01 model=mlp'"
    compare.add_argument("sides", nargs="+", metavar="A B", help=sides)
    compare.add_argument("--pair", metavar="KEYS", help="pair runs by these; none; default: seed and fold")
    compare.add_argument("--metric", metavar="NAME", help="such as test/accuracy; default: the objective")
    compare.add_argument("--filter", action="append", default=[], metavar="KEY=VALUE", help="of both sides")
    return top


def answer(options: argparse.Namespace) -> Iterable[str]:
    """The lines that the verb prints."""
    from lockstep.runs.difference import compare
    from lockstep.runs.table import default_columns, filtered, grouped, read_runs, sorted_groups, table

    if options.verb == "compare":
        return compare(options.sides, options.pair, options.metric, options.filter)
    runs, problems = read_runs(options.folders)
    for problem in problems:
        print(f"lockstep: {problem}", file=sys.stderr)
    if not runs:
        raise ConfigError(f"no run below {' '.join(options.folders)}; type python src/runs.py table <another folder>")
    chosen = filtered(runs, options.filter)
    if not chosen:
        raise ConfigError(f"none of {len(runs)} runs has {' and '.join(options.filter)}; type another --filter")
    columns = options.columns.split(",") if options.columns else default_columns(chosen)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    groups = [[run] for run in chosen] if options.each else grouped(chosen)
    return table(sorted_groups(groups, options.sort, options.reverse), columns, width)


def main(words: list[str]) -> int:
    """Returns the exit code."""
    try:
        for line in answer(parser().parse_args(words)):
            print(line)
        sys.stdout.flush()
        return EXIT_FINISHED
    except ConfigError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FINISHED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
