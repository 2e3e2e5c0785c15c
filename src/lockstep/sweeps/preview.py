"""What `sweep.preview=true` prints: the jobs that a sweep would run now, and about how long each trains."""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from lockstep.config.schema import Node, flatten
from lockstep.runs.record import Run, seconds_of, state_of
from lockstep.runs.repeats import REPEATS
from lockstep.runs.table import read_runs
from lockstep.sweeps.search import Job, Search
from lockstep.sweeps.summary import say
from lockstep.sweeps.table import SweepTable
from lockstep.text import aligned

RUNS = "outputs"  # where runs are looked for, beside the sweep's own folder
LIKE = ("model.", "dataset.", "trainer.epochs", "trainer.max_steps", "trainer.batch_size")
UNKNOWN = "unknown"


def print_preview(table: SweepTable, search: Search, values: Callable[[Job], Node], slots: int) -> None:
    """Print the jobs that `search` starts before it knows a result, and what it says of the others.

    values: all values of a job's config.
    slots: how many jobs run at once.
    """
    jobs = list(iter(search.ask, None))
    runs, _ = read_runs([str(folder) for folder in (table.folder, RUNS) if os.path.isdir(folder)])
    finished = [run for run in runs if state_of(run) == "finished"]
    times = [expected_seconds(flatten(values(job)), finished) for job in jobs]
    over = len(table.rows) - len(jobs)
    more = f", {over} more are over or run elsewhere" if over else ""
    say(f"sweep: preview of {len(jobs)} jobs{more}; nothing runs, and nothing is written")
    cells = [("job", "seconds", "changes")]
    for job, seconds in zip(jobs, times, strict=True):
        changes = ", ".join(filter(None, [table.rows[job.number].overrides or "nothing", job.part]))
        cells.append((str(job.number), UNKNOWN if seconds is None else f"{seconds:.1f}", changes))
    for line in aligned(cells, right=(0, 1)):
        say(f"  {line}")
    known = [seconds for seconds in times if seconds is not None]
    if known:
        rest = f"; unknown of the other {len(jobs) - len(known)}" if len(known) < len(jobs) else ""
        total = timedelta(seconds=round(sum(known) / min(slots, len(known))))
        say(f"training:   about {total} for {len(known)} jobs{f', {slots} at once' * (slots > 1)}{rest}")
    elif jobs:
        say(f"training:   unknown, as no run like these has finished below {RUNS}")
    if outlook := search.outlook():
        say(f"then:       {outlook}")


def expected_seconds(config: Mapping[str, Any], finished: Sequence[Run]) -> float | None:
    """How long a job trains: the median of finished runs with the same model, data, epochs and batch size.

    None without such a run. A value that is null in the job's config may be any, as a run gets it from its data; so may
    one that an environment variable decides.
    """
    wanted = {
        key: value for key, value in config.items() if key.startswith(LIKE) and key not in REPEATS and value is not None
    }
    like = [
        seconds_of(run)
        for run in finished
        if all(
            run["config"].get(key, value) == value or "${" in str(run["config"][key]) for key, value in wanted.items()
        )
    ]
    if not like:
        return None
    until, epochs = config.get("trainer.pause_after"), config["trainer.epochs"]
    return statistics.median(like) * (min(until, epochs) / epochs if until else 1)
