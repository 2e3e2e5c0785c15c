"""A sweep whose jobs are run by ranks that another program has started."""

import multiprocessing
import time
from pathlib import Path

import pytest

from lockstep.distributed.environment import RankInfo
from lockstep.errors import ConfigError
from lockstep.sweeps.process import Outcome
from lockstep.sweeps.runner import OpenSweep, end_sweep, run_in_world
from lockstep.sweeps.search import Job, JobList, Search, add_jobs, folder_name
from lockstep.sweeps.table import Row, read_table
from support.ports import free_port
from support.sweep_tables import settings

SECONDS_LATE = 1.0


def rank_of_a_sweep(rank: int, port: int, folder: Path, refuses: bool) -> None:
    """Ends with 7 for a ConfigError. Rank 1 is late after each job."""

    def work(job: Job, row: Row) -> Outcome:
        (folder / row.folder).mkdir(exist_ok=True)
        time.sleep(SECONDS_LATE * rank)
        return Outcome(0, 0.5)

    def open_sweep() -> tuple[OpenSweep, Search]:
        if refuses:
            raise ConfigError("the folder is locked")
        sweep = OpenSweep(folder, settings(), [], {}, {}, [])
        lists = [["seed=1"], ["seed=2"]]
        jobs = add_jobs(sweep.table, lists, set(), lambda number, changed, overrides: folder_name(number, changed))
        return sweep, JobList(jobs)

    try:
        run_in_world(RankInfo(rank, 2, rank, 2, "environment", "127.0.0.1", port), open_sweep, work)
    except ConfigError as error:
        raise SystemExit(7 if str(error) == "the folder is locked" else 1) from None
    raise SystemExit(end_sweep())


@pytest.mark.parametrize(("refuses", "code"), [(False, 0), (True, 7)])
def test_rank_0_stays_until_the_others_have_read_the_end(tmp_path: Path, refuses: bool, code: int) -> None:
    """It hosts the store, and under srun nobody else keeps it."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    ranks = [context.Process(target=rank_of_a_sweep, args=(rank, port, tmp_path, refuses)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [code, code]
    assert [row.state for row in read_table(tmp_path)] == ([] if refuses else ["finished", "finished"])
