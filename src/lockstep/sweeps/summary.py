"""What a sweep shows at its end: the table sorted by objective, causes of failures, and what to type next."""

import math
import os
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lockstep.errors import EXIT_FINISHED, EXIT_JOBS_FAILED, EXIT_RESUMABLE, ConfigError
from lockstep.runs.record import Run, read_run
from lockstep.runs.repeats import (
    Estimate,
    decimals_for,
    estimate,
    is_repeat,
    is_share,
    setting_of,
    split_overlap,
    wilson,
)
from lockstep.sweeps.table import FAILED, FINISHED, REFUSED, STATES, SUBMITTED, TABLE, Row, SweepTable
from lockstep.text import aligned

SHOWN = 40  # rows on the console
CAUSE = 100  # characters of a cause on the console


def say(text: str) -> None:
    """Print text. After the first write that fails, as with `| head -1`, this process and its jobs print nothing."""
    try:
        print(text, flush=True)
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


@dataclass(frozen=True)
class Setting:
    """Jobs that differ only in what repeats a run, such as seed, and what their numbers say together.

    overrides: what they change beside that, as words of a shell.
    objective, test: of the jobs that have finished. None if none has; `test` if one of them has not been tested.
    """

    overrides: str
    rows: Sequence[Row]
    objective: Estimate | None
    test: Estimate | None

    @property
    def finished(self) -> int:
        return sum(row.state == FINISHED for row in self.rows)


def settings_of(rows: Iterable[Row], mode: str, runs: Mapping[int, Run] = {}) -> list[Setting]:
    """The settings of a sweep. The best mean comes first, then settings of which jobs are missing, for their mean is
    that of the jobs which went well.

    mode: "min" or "max".
    runs: {job: its run.json}, which tell the folds of a job, if it has any.
    """
    jobs: dict[object, list[Row]] = {}
    seen: Counter[str] = Counter()  # a job that is listed twice is trained twice, and tells nothing new
    for row in sorted(rows, key=lambda row: row.number):
        key = setting_of(shlex.split(row.overrides)), seen[row.overrides]
        seen[row.overrides] += 1
        jobs.setdefault(key, []).append(row)
    settings = []
    for members in jobs.values():
        words = shlex.split(members[0].overrides)
        finished = [row for row in members if row.state == FINISHED]
        values = [row.objective for row in finished if row.objective is not None]
        tests = [row.test for row in finished if row.test is not None]
        overlap = split_overlap([runs[row.number] for row in finished if row.number in runs])
        settings.append(
            Setting(
                members[0].overrides if len(members) == 1 else shlex.join(setting_of(words)),
                members,
                estimate(values, overlap) if values else None,
                estimate(tests, overlap) if tests and len(tests) == len(values) else None,
            )
        )
    sign = -1 if mode == "max" else 1

    def place(setting: Setting) -> tuple[bool, bool, float, int]:
        mean = math.nan if setting.objective is None else setting.objective.mean
        is_missing = setting.finished < len(setting.rows)
        return setting.finished == 0, is_missing, math.inf if math.isnan(mean) else sign * mean, setting.rows[0].number

    return sorted(settings, key=place)


def sorted_rows(table: Iterable[Row], mode: str) -> list[Row]:
    """The finished rows first, best first, and the failed ones last. mode: "min" or "max"."""
    sign = -1 if mode == "max" else 1

    def place(row: Row) -> tuple[int, float, int]:
        value = row.best if row.objective is None else row.objective
        is_known = value is not None and not math.isnan(value)
        return STATES.index(row.state), sign * value if is_known and value is not None else math.inf, row.number

    return sorted(table, key=place)


def print_summary(table: SweepTable, objective: str, mode: str, command: Sequence[str], resume: Sequence[str]) -> None:
    """Print the table, which job or setting is the best, and what to type.

    objective, mode: of jobs whose run.json does not tell.
    command: the words of one run without what the sweep varies.
    resume: those that go on with this sweep.
    """
    runs: dict[int, Run] = {}  # {job: its run.json}: a job may have chosen another metric
    for row in table:
        with suppress(ConfigError):
            if row.objective is not None:
                runs[row.number] = read_run(table.folder / row.folder)
    names = sorted({run["objective"]["name"] for run in runs.values()})
    if len(names) == 1:
        objective, mode = next((run["objective"]["name"], run["objective"]["mode"]) for run in runs.values())
    rows = sorted_rows(table, mode) if len(names) <= 1 else sorted(table, key=lambda row: row.number)
    counts = [f"{count} {state}" for state in STATES if (count := sum(row.state == state for row in rows))]
    say(f"\nsweep: {', '.join(counts)}; {TABLE} in {table.folder.absolute()}")
    settings = settings_of(rows, mode, runs) if len(names) <= 1 else []
    if any(len(setting.rows) > 1 for setting in settings):
        _print_settings(settings, objective)
    else:
        _print_rows(rows, objective, runs if len(names) > 1 else {})
    best = settings[0] if settings and settings[0].finished else None
    if len(names) > 1:
        say(f"best:       none, as the objectives are different metrics: {', '.join(names)}")
    elif best is not None:
        if len(best.rows) == 1:
            say(f"best:       job {best.rows[0].number}, {table.folder / best.rows[0].folder}")
        else:
            say(f"best:       {best.overrides or 'the one setting'}, by the mean of {_jobs(best.rows)}")
        candidates = sum(any(row.objective is not None for row in setting.rows) for setting in settings)
        if candidates > 1:
            records = [runs[row.number] for row in best.rows if row.number in runs]
            say(f"choosing:   {cost_of_choosing(best, candidates, objective, records)}")
        say(f"run it again: {shlex.join([*command, *_words_of(best)])}")
    if any(row.state not in (FINISHED, FAILED) for row in rows):
        say(f"go on with: {shlex.join(resume)}")
    if any(row.state == FAILED and not row.cause.startswith(REFUSED) for row in rows):
        say(f"run what failed again: {shlex.join([*resume, 'sweep.retry=failed'])}")
    say(f"curves:     {shlex.join(['tensorboard', '--logdir', str(table.folder.absolute())])}")


def _print_rows(rows: Sequence[Row], objective: str, named: Mapping[int, Run]) -> None:
    """The table of jobs. named: the run.json of jobs whose objectives have other names."""
    test = _test_column(objective, rows)
    header = ["job", "state", "objective" if named else objective, *test, "at step", "seconds", "overrides"]
    cells = [header]
    for row in rows[:SHOWN]:
        value = _number(row.best if row.objective is None else row.objective)
        if row.number in named:
            value = f"{named[row.number]['objective']['name']} {value}"
        numbers = [value, *(_number(row.test) for _ in test)]
        best_step = "" if row.best_step is None else str(row.best_step)
        words = f"{row.overrides}{_cause(row)}"
        cells.append([str(row.number), row.state, *numbers, best_step, f"{row.seconds:.1f}", words])
    for line in aligned(cells):
        say(f"  {line}")
    if len(rows) > SHOWN:
        say(f"... and {len(rows) - SHOWN} more in {TABLE}")


def _print_settings(settings: Sequence[Setting], objective: str) -> None:
    """The table of settings, each with its jobs below it; without these where they are too many for a screen."""
    estimates = [setting.objective for setting in settings if setting.objective is not None]
    decimals = decimals_for(estimates)
    test = _test_column(objective, [row for setting in settings for row in setting.rows])
    cells = [["job", "state", objective, "95 %", "deviation", *test, "seconds", "overrides"]]
    with_jobs = len(settings) + sum(len(setting.rows) for setting in settings) <= SHOWN
    most = max(setting.finished for setting in settings)
    for setting in settings[:SHOWN]:
        if len(setting.rows) > 1 or not with_jobs:
            cells.append(_setting_cells(setting, most, decimals, len(test)))
        for row in setting.rows if with_jobs else []:
            is_alone = len(setting.rows) == 1
            words = row.overrides if is_alone else f"  {shlex.join(filter(is_repeat, shlex.split(row.overrides)))}"
            numbers = [_number(row.objective), "", "", *(_number(row.test) for _ in test)]
            number = str(row.number) if is_alone else f"  {row.number}"
            cells.append([number, row.state, *numbers, f"{row.seconds:.1f}", f"{words}{_cause(row)}"])
    for line in aligned(cells):
        say(f"  {line}")
    if not with_jobs:
        more = f"{len(settings) - SHOWN} more settings and " if len(settings) > SHOWN else ""
        say(f"... and {more}the single jobs in {TABLE}")


def _setting_cells(setting: Setting, most: int, decimals: int, tests: int) -> list[str]:
    """most: jobs of the setting that has most of them. tests: how many columns of the test set there are."""
    count = f"{setting.finished} jobs"
    if setting.finished < len(setting.rows):
        count = f"{setting.finished} of {len(setting.rows)} jobs"
    elif setting.finished < most:
        count = f"{setting.finished} jobs, others {most}"
    states = {row.state for row in setting.rows}
    state = next(iter(states)) if len(states) == 1 else ""
    numbers = ["", "", ""]
    if setting.objective is not None:
        numbers[0] = f"{setting.objective.mean:.{decimals}f}"
        if setting.objective.interval is not None:
            numbers[1] = "{:.{digits}f} to {:.{digits}f}".format(*setting.objective.interval, digits=decimals)
        if setting.objective.freedom:
            numbers[2] = f"{setting.objective.std:.{decimals}f}"
    numbers += ["" if setting.test is None else f"{setting.test.mean:.{decimals}f}"] * tests
    return [count, state, *numbers, f"{sum(row.seconds for row in setting.rows):.1f}", setting.overrides]


def _test_column(objective: str, rows: Sequence[Row]) -> list[str]:
    """The header of the column of the test set, if jobs have such a number beside their objective."""
    name = f"test/{objective.partition('/')[2]}"
    return [name] if name != objective and any(row.test is not None for row in rows) else []


def _cause(row: Row) -> str:
    return f"   {textwrap.shorten(row.cause, CAUSE, placeholder=' ...')}" if row.cause else ""


def _jobs(rows: Sequence[Row]) -> str:
    return f"jobs {', '.join(str(row.number) for row in rows if row.state == FINISHED)}"


def _words_of(setting: Setting) -> list[str]:
    """What to type after the words of all jobs, for the jobs of one setting."""
    if len(setting.rows) == 1:
        return shlex.split(setting.overrides)
    values: dict[str, dict[str, None]] = {}
    for row in setting.rows:
        for word in filter(is_repeat, shlex.split(row.overrides)):
            key, _, value = word.partition("=")
            values.setdefault(key, {})[value] = None
    return [*shlex.split(setting.overrides), "-m", *(f"{key}={','.join(values[key])}" for key in values)]


def cost_of_choosing(best: Setting, candidates: int, objective: str, runs: Sequence[Run]) -> str:
    """What the number of the best of several settings is worth, in one line, and what the test set says of it.

    candidates: settings that the best one was chosen from. runs: the best one's.
    """
    assert best.objective is not None
    split, _, metric = objective.partition("/")
    chosen = f"{objective} {_number(best.objective.mean)} is the best of {candidates}, and so it is optimistic"
    if split == "test":
        return f"on the test set: {chosen}"
    if best.test is None:
        return f"{chosen}; the test set has not been read"
    samples = {run["data"].get("test_samples") for run in runs}
    count = samples.pop() if len(samples) == 1 else None
    interval, source = best.test.interval, f"from {best.test.count} jobs"
    if is_share(metric) and count:
        interval, source = wilson(best.test.mean, count), f"from {count} test samples"
    known = "with one job its interval is not known" if interval is None else ""
    if interval is not None:
        known = f"95 %: {interval[0]:.4g} to {interval[1]:.4g}, {source}"
    return f"{chosen}; test/{metric} {_number(best.test.mean)} had no part in it ({known})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def exit_code(rows: Sequence[Row], stop_code: int | None) -> int:
    """The exit code of the whole sweep: 0 only if every job has finished, or was submitted and is not waited for.

    stop_code: of jobs that a signal stopped.
    """
    if stop_code is not None:
        return stop_code
    states = {row.state for row in rows if row.cause != SUBMITTED}
    if FAILED in states:
        return EXIT_JOBS_FAILED
    return EXIT_FINISHED if states <= {FINISHED} else EXIT_RESUMABLE
