"""Sweeps that are killed, stopped or run several jobs at once end with the objectives of an undisturbed sweep."""

import os
import random
import re
import shlex
import signal
import time
from contextlib import suppress

import pytest

from support.commands import PYTHON_TRAIN, ROOT, Command, processes_of, wait_for
from support.run_folders import has_logged, read_log
from support.slurm_cluster import CGROUPS, LIMITS_MEMORY
from support.sweep_tables import column, rows_of, states

pytestmark = pytest.mark.drill

RATES = "optimizer.lr=0.1,0.05,0.02"
JOBS = ["model=mlp", "trainer.epochs=4", "snapshot.every=5steps", "hydra.sweep.dir=s"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The objectives of a sweep of plain processes, which each take what cores there are for one job."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return column(Command([*PYTHON_TRAIN, "-m", RATES, *JOBS], folder).finish().cwd / "s", "objective")


def test_a_sweep_killed_at_any_moment_ends_with_the_same_objectives(start, undisturbed):
    """kill -9 of the parent alone, three times at random moments, and the same command after each."""
    moments = random.Random(7)
    for _ in range(3):
        run = start(*PYTHON_TRAIN, "-m", RATES, *JOBS)
        wait_for((run.cwd / "s" / "sweep.csv").exists, "table")
        time.sleep(moments.uniform(0, 0.8))
        with suppress(ProcessLookupError):  # on a fast machine the sweep may have ended
            run.send(signal.SIGKILL)
        run.process.wait()
    cwd = start(*PYTHON_TRAIN, "-m", RATES, *JOBS).finish().cwd
    assert states(cwd / "s") == ["finished"] * 3
    assert column(cwd / "s", "objective") == undisturbed
    assert sorted(path.name for path in (cwd / "s").glob("[0-9]*")) == [row["folder"] for row in rows_of(cwd / "s")]


def test_ctrl_c_stops_a_sweep_which_then_goes_on(start):
    command = [*PYTHON_TRAIN, "-m", RATES, *JOBS, "launch=fork", "trainer.epochs=40"]
    whole = start(*command, "hydra.sweep.dir=whole").finish()
    run = start(*command)
    wait_for(lambda: list((run.cwd / "s").glob("0_*/snapshots/step_*[0-9]")), "snapshot")
    run.send(signal.SIGINT, to="group")
    run.finish(75)
    assert states(run.cwd / "s") == ["stopped", "waiting", "waiting"]
    (again,) = re.findall(r"^go on with: \S+ \S+train.py (-m .* hydra.sweep.dir=s)$", run.output, re.MULTILINE)
    assert f"go on there with {again}" in run.output
    more = start(*PYTHON_TRAIN, *shlex.split(again)).finish()
    assert "resumed from" in more.output
    assert column(run.cwd / "s", "objective") == column(whole.cwd / "whole", "objective")


def test_a_job_that_raises_is_killed_or_hangs_harms_no_other(start):
    """One process a job, without ranks of their own: job 1 raises, job 2 is killed, job 3 hangs."""
    kinds = ["none", "raise", "kill", "hang", "none"]
    swept = ["model._target_=support.faults.SweptModel", f"+model.kind={','.join(kinds)}", "watch.timeout=5"]
    command = [*PYTHON_TRAIN, "-m", "model=mlp", *swept, "+model.rank=0", "trainer.epochs=1"]
    run = start(*command, "hydra.sweep.dir=s", PYTHONPATH=ROOT / "tests").finish(1)
    assert states(run.cwd / "s") == ["finished", "failed", "failed", "failed", "finished"]
    causes = column(run.cwd / "s", "cause")
    assert "rank 0 of 1: RuntimeError:" in causes[1]
    assert "SIGKILL" in causes[2]
    assert "user code" in causes[3]
    limited = start(*command, "sweep.max_failures=2", "hydra.sweep.dir=t", PYTHONPATH=ROOT / "tests").finish(1)
    assert states(limited.cwd / "t") == ["finished", "failed", "failed", "waiting", "waiting"]
    begun = {path.name for path in (limited.cwd / "t").glob("[0-9]*")}
    assert begun == {row["folder"] for row in rows_of(limited.cwd / "t")[:3]}  # job 3 was ready, and leaves nothing


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_two_slots_run_two_jobs_at_once_with_the_same_numbers(start):
    jobs = ["-m", "optimizer.lr=0.1,0.05,0.02,0.01", "model=mlp", "trainer.epochs=3"]
    one = start(*PYTHON_TRAIN, *jobs, "hydra.sweep.dir=one").finish()
    two = start(*PYTHON_TRAIN, *jobs, "sweep.slots=2", "hydra.sweep.dir=two")
    table = two.cwd / "two" / "sweep.csv"
    wait_for(lambda: table.exists() and states(table.parent).count("running") == 2, "second running job")
    two.finish()
    assert states(two.cwd / "two") == ["finished"] * 4
    assert column(two.cwd / "two", "objective") == column(one.cwd / "one", "objective")
    assert {line[:3] for line in two.output.splitlines() if line.startswith("[")} == {f"[{job}]" for job in range(4)}
    many = start(*PYTHON_TRAIN, *jobs, "sweep.slots=1000").finish(2)
    assert "sweep.slots=1000 is more than the" in many.sentence
    assert "sweep.slots=auto" in many.sentence


MEMORY = CGROUPS / "lockstep_sweep"
LIMIT = 2**30


@pytest.mark.skipif(not LIMITS_MEMORY, reason="needs a machine whose memory cgroup (v1) can be written")
@pytest.mark.parametrize("launch", ["env", "fork", "torchrun"])
def test_a_job_that_the_system_kills_for_want_of_memory_harms_no_other(start, launch):
    """All processes of the sweep share 1 GB, and a rank of job 1 wants four."""
    swept = ["model._target_=support.faults.SweptModel", "+model.kind=none,more_memory,none", "+model.rank=0"]
    command = [*PYTHON_TRAIN, "-m", "model=mlp", *swept, "trainer.epochs=1", "hydra.sweep.dir=s", f"launch={launch}"]
    MEMORY.mkdir(exist_ok=True)
    try:
        (MEMORY / "memory.limit_in_bytes").write_text(str(LIMIT))
        enter = f"echo $$ > {MEMORY}/cgroup.procs; exec {shlex.join(command)}"
        run = start("bash", "-c", enter, PYTHONPATH=ROOT / "tests").finish(1)
    finally:
        wait_for(lambda: not (MEMORY / "cgroup.procs").read_text(), "end of all processes")
        MEMORY.rmdir()
    assert states(run.cwd / "s") == ["finished", "failed", "finished"]
    assert "SIGKILL" in column(run.cwd / "s", "cause")[1]
    assert "memory" in column(run.cwd / "s", "cause")[1]


def test_the_seconds_of_a_life_that_was_killed_are_counted(start):
    jobs = ["-m", "seed=1,2", "model=mlp", "trainer.epochs=40000", "snapshot.every=10steps", "hydra.sweep.dir=s"]
    run = start(*PYTHON_TRAIN, *jobs)
    wait_for(lambda: list((run.cwd / "s").glob("0_*/snapshots/step_*[0-9]")), "snapshot")
    time.sleep(3)
    run.send(signal.SIGKILL, to="group")  # the job cannot note when it ended
    run.process.wait()
    (run.cwd / "s" / "0_seed=1" / "link").symlink_to("moved away")
    again = start(*PYTHON_TRAIN, *jobs)
    wait_for(lambda: "resumed from" in read_log(run.cwd / "s" / "0_seed=1"), "second life of job 0")
    wait_for(lambda: read_log(run.cwd / "s" / "0_seed=1").rpartition("resumed from")[2].count("epoch "), "its epoch")
    again.send(signal.SIGTERM)
    again.finish(75)
    assert 3 < float(column(run.cwd / "s", "seconds")[0]) < 120


def test_a_table_that_cannot_be_written_ends_the_sweep_which_then_goes_on(start):
    """A folder stands where the table is written, while job 0 trains: that is refused as a full disk is."""
    command = [*PYTHON_TRAIN, "-m", RATES, *JOBS, "trainer.epochs=40"]
    run = start(*command)
    wait_for(lambda: list((run.cwd / "s").glob("0_*/snapshots/step_*[0-9]")), "snapshot")
    (run.cwd / "s" / "sweep.csv.tmp").mkdir()
    run.finish(2)
    assert "table.py" not in run.output  # no traceback of ours
    sentence = "s/sweep.csv cannot be written (Is a directory); free some space there, then type -m "
    assert re.search(rf"^lockstep: {re.escape(sentence)}.* hydra.sweep.dir=s$", run.output, re.MULTILINE)
    wait_for(lambda: not processes_of(run.process.pid), "the end of all processes", 3)
    assert len(list((run.cwd / "s").glob("[0-9]_*"))) == 1  # job 1 was ready, and leaves nothing
    (run.cwd / "s" / "sweep.csv.tmp").rmdir()
    start(*command).finish()
    assert states(run.cwd / "s") == ["finished"] * 3


def test_jobs_that_run_side_by_side_save_and_end_when_the_table_cannot_be_written(start):
    """The end of the first job cannot be written. The other one is asked to save, and what it prints is shown."""
    jobs = ["-m", "trainer.epochs=60,4000", "model=mlp", "sweep.slots=2", "hydra.sweep.dir=s", "logger=[console]"]
    run = start(*PYTHON_TRAIN, *jobs)
    wait_for(lambda: has_logged(run.cwd / "s" / "1_trainer.epochs=4000", "epoch 1/"), "the second job")
    (run.cwd / "s" / "sweep.csv.tmp").mkdir()
    run.finish(2)
    assert "stopped early at step" in run.output
    wait_for(lambda: not processes_of(run.process.pid), "the end of all processes", 3)


def test_a_signal_after_the_end_of_the_last_job_changes_no_exit_code(start):
    """The sweep is paused while its job ends, so that the signal is there when it sees the end."""
    words = ["-m", "optimizer.lr=0.1,0.05", "model=linear", "trainer.epochs=100", "hydra.sweep.dir=s"]
    run = start(*PYTHON_TRAIN, *words)
    record = run.cwd / "s" / "1_optimizer.lr=0.05" / "run.json"
    wait_for(record.exists, "last job")
    run.send(signal.SIGSTOP)
    assert '"state": "finished"' not in record.read_text()
    wait_for(lambda: '"state": "finished"' in record.read_text(), "end of the last job")
    run.send(signal.SIGTERM)
    run.send(signal.SIGCONT)
    assert "sweep: 2 finished" in run.finish().output
