"""What the runs in a folder were, and how they compare. It trains nothing itself.

python src/runs.py table outputs --sort objective --filter optimizer.lr=0.1
python src/runs.py compare outputs/multirun/a --a optimizer.lr=0.1 --b optimizer.lr=0.01
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from lockstep.errors import EXIT_CONFIG, EXIT_FINISHED, ConfigError


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python src/runs.py", description="Lists runs and compares them.")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    table = verbs.add_parser("table", help="the runs below the folders, those of one configuration in one line")
    table.add_argument("folders", nargs="*", default=["outputs"], metavar="FOLDER", help="default: outputs")
    table.add_argument(
        "--sort", metavar="KEY", help="a column or a config key; default: date, or for one sweep the best first"
    )
    table.add_argument("--each", action="store_true", help="a line for each run, also of those that differ in seed")
    table.add_argument("--filter", action="append", default=[], metavar="KEY=VALUE", help="may be repeated")
    table.add_argument("--columns", metavar="A,B", help="columns and config keys, with commas between them")
    compare = verbs.add_parser("compare", help="which of two configurations is better, and how sure that is")
    compare.add_argument("folders", nargs="+", metavar="FOLDER", help="one for each side, or those with --a and --b")
    compare.add_argument("--a", metavar="OVERRIDES", help="such as 'optimizer.lr=0.1 model=mlp'")
    compare.add_argument("--b", metavar="OVERRIDES")
    compare.add_argument("--metric", metavar="NAME", help="such as test/accuracy; default: the objective")
    diff = verbs.add_parser("diff", help="in what two runs differ")
    diff.add_argument("folders", nargs=2, metavar="FOLDER")
    samples = verbs.add_parser("samples", help="the samples of a run's test with the highest loss")
    samples.add_argument("place", type=Path, metavar="FOLDER", help="or a file as mode=evaluate writes it")
    samples.add_argument("--worst", type=int, default=20, metavar="N", help="how many; default: 20")
    samples.add_argument("--by", metavar="COLUMN", help="instead, means over those with one value in this column")
    return top


def answer(options: argparse.Namespace) -> Iterable[str]:
    """The lines that the verb prints."""
    from lockstep.runs import stats, table

    if options.verb == "compare":
        return table.compare(options.folders, options.a, options.b, options.metric)
    if options.verb == "diff":
        return table.diff(*options.folders)
    if options.verb == "samples":
        return stats.samples_table(options.place, options.worst, options.by)
    runs = table.rows_of(options.folders)
    if not runs:
        raise ConfigError(f"no run below {' '.join(options.folders)}; type python src/runs.py table <another folder>")
    found = table.filtered(runs, options.filter)
    if not found:
        raise ConfigError(f"none of {len(runs)} runs has {' and '.join(options.filter)}; type another --filter")
    sweeps = {run["sweep"] for run in found}
    if len(sweeps) == 1 and None not in sweeps and not (options.sort or options.each or options.columns):
        return table.of_sweep(found)
    rows = table.ordered(found if options.each else table.settings(found), options.sort or "date")
    return table.show(rows, options.columns.split(",") if options.columns else table.telling(rows))


def main(words: list[str]) -> int:
    """Returns the exit code."""
    logging.basicConfig(format="lockstep: %(message)s")
    try:
        for line in answer(parser().parse_args(words)):
            print(line)
        sys.stdout.flush()
        return EXIT_FINISHED
    except (ConfigError, FileNotFoundError) as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
