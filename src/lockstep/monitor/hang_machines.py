"""Machines that wait for each other show each other what their ranks do, in files of the run folder that they share."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.files import write_whole
from lockstep.monitor.hang_collectives import Collective, Record
from lockstep.monitor.hang_evidence import RankFacts, SharedSum
from lockstep.monitor.hang_stack import Frame, Stack


def exchange(run_dir: str, mine: Sequence[RankFacts], clock_ahead: float) -> list[RankFacts]:
    """Show `mine`, the facts of this machine's ranks. Returns what others have shown since these ranks fell silent.

    clock_ahead: seconds from the clock of rank 0's machine to this machine's. Raises OSError, ValueError. A network
    file system may not answer for long, so call this in a thread.
    """
    now = time.time() - clock_ahead
    folder = Path(run_dir, "logs")
    own = folder / f"hang_of_rank{mine[0].rank}.json"
    write_whole(own, json.dumps({"time": now, "ranks": [asdict(rank) for rank in mine]}))
    silent_since = now - min(rank.seconds for rank in mine)
    found: list[RankFacts] = []
    for path in set(folder.glob("hang_of_rank*.json")) - {own}:
        shown = json.loads(path.read_text())
        if shown["time"] >= silent_since:  # else it is of an earlier hang
            found += [_facts(values) for values in shown["ranks"]]
    return found


def _facts(values: dict[str, Any]) -> RankFacts:
    """What `asdict` has made of a rank's facts -> these facts. A rank that waits has no busy worker."""
    record, total = values["record"], values["shared_sum"]
    entries = tuple(Collective(**entry | {"call": tuple(entry["call"])}) for entry in record["entries"])
    parts = {
        "stack": Stack(tuple(Frame(**frame) for frame in values["stack"]["frames"])),
        "record": Record(**record | {"entries": entries, "point_to_point": tuple(record["point_to_point"])}),
        "shared_sum": None if total is None else SharedSum(**total),
        "busy_worker": None,
    }
    return RankFacts(**values | parts)
