"""Sweeps: what is refused before the first job, the end of a sweep, and what the command does when it is typed again.

Sweeps that are killed at any moment, jobs at once, and searches are drills.
"""

import fcntl
import json
import re
import shlex
import sys

import pytest
from scipy import stats

from support.commands import PYTHON_TRAIN, ROOT, TRAIN
from support.sweep_tables import objectives, runs_of, states

SHORT = ["model=linear", "trainer.max_steps=2"]
REFUSED = {
    "optimizer.lr=0.1,-1,0.01": "the job optimizer.lr=-1: torch.optim.SGD refuses its arguments (",
    "launch=torchrun gradient_sync=ring,powersgd strategy=ddp,fsdp": "the job gradient_sync=ring strategy=fsdp: "
    "strategy=fsdp cannot have",
    "mode=train,check": "mode=check is no training, and a sweep trains; type",
    "+dataset.own={n:1},{n:2} +dataset.own={seed:3},{seed:4}": "would drop one; type a list for each key",
    "seed=1,2 hydra.launcher.retries=-1": "hydra.launcher.retries=-1 should be greater than or equal to 0",
    "hydra/sweeper=optuna optimizer.lr=0.1,1 hydra.sweeper.sampler._target_=optuna.samplers.Tpe": "hydra.sweeper."
    "sampler._target_=optuna.samplers.Tpe cannot be imported",
    "hydra/sweeper=optuna seed=1": "nothing varies in this search; type 'optimizer.lr=",
    "hydra/sweeper=optuna optimizer.lr=0.1,1 loader.validation=null": "here nothing is chosen; type loader.validation=",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_cannot_work_is_refused_before_the_first_job(start, typed):
    run = start(*PYTHON_TRAIN, *SHORT, "-m", *typed.split(), "hydra.sweep.dir=s").finish(2)
    assert REFUSED[typed] in run.sentence
    assert "; type " in run.sentence or "; leave " in run.sentence
    assert "sweep: " not in run.output


def test_the_end_of_a_sweep_and_the_command_typed_again(start):
    """lr=1e10 diverges. Then: nothing is run twice, and a value more in the list is one job more."""
    command = [*PYTHON_TRAIN, "model=mlp", "trainer.epochs=1", "-m", "hydra.sweep.dir=s"]
    run = start(*command, "optimizer.lr=0.1,1e10,0.02").finish(1)
    folder, diverged = run.cwd / "s", "optimizer.lr=10000000000.0"
    assert states(folder) == {"optimizer.lr=0.02": "finished", "optimizer.lr=0.1": "finished", diverged: "diverged"}
    times = sorted((one["started"], one["ended"]) for job in runs_of(folder).values() for one in job["starts"])
    assert len(times) == 3  # a run that has diverged would do so again
    assert all(ended <= began for (_, ended), (began, _) in zip(times, times[1:], strict=False))
    end = run.output[run.output.index("\nsweep: 2 finished, 1 diverged") :]
    assert start(sys.executable, ROOT / "src" / "runs.py", "table", "s").finish().output in end  # the same again
    numbers = [f"{value:.4f}" for value in sorted(objectives(folder).values(), key=lambda x: -(x or 0))[:2]]
    rows = re.findall(r"^finished +([\d.]+) .* (\S+)$", end, re.MULTILINE)
    assert rows == [*zip(numbers, ("s/optimizer.lr=0.1", "s/optimizer.lr=0.02"), strict=True)]
    assert "\nbest:       optimizer.lr=0.1\n" in end
    assert re.search(r"^choosing: +val/accuracy \S+ is the best of 2, and so it is optimistic; ", end, re.MULTILINE)
    assert re.search(rf"^diverged: +{diverged}: .*the loss is", end, re.MULTILINE)
    again = "-m model=mlp trainer.epochs=1 optimizer.lr=0.1,1e10,0.02 hydra.sweep.dir=s"
    assert f"go on with: python {TRAIN} {again}\n" in end
    assert not re.search("table: |train on: ", run.output)  # of the single runs

    first = runs_of(folder)
    more = start(*command, "optimizer.lr=0.05,0.1,0.02").finish()
    assert re.findall(r"^sweep: job (.*)", more.output, re.MULTILINE) == ["1 of 1, optimizer.lr=0.05"]
    assert "sweep: 1 jobs, 1 at once; 2 have finished before; in s\n" in more.output
    assert first.items() <= runs_of(folder).items()
    command[command.index("trainer.epochs=1")] = "trainer.epochs=2"
    assert "sweep: job 1 of 1" in start(*command, "optimizer.lr=0.02").finish().output  # another configuration
    other = start(*command, "optimizer.lr=0.1,0.02", "model.width=16").finish(2)
    assert "s/optimizer.lr=0.1 holds a run with model.width=" in other.sentence
    assert other.sentence.endswith("or hydra.sweep.dir=<a new folder>")


def test_a_key_that_gets_a_list_later_does_not_run_its_first_value_again(start):
    command = [*PYTHON_TRAIN, *SHORT, "-m", "hydra.sweep.dir=s", "optimizer.lr=0.0001,0.0002,0.1"]
    best = "\nbest:       optimizer.lr=0.1; optimizer.lr is at the edge of its list\n"
    assert best in start(*command, "seed=1").finish().output
    more = start(*command, "seed=1,2", "backend.timeout=60", "logger=[csv]").finish()
    started = re.findall(r"^sweep: job (.*)", more.output, re.MULTILINE)
    assert started[::2] == ["1 of 3, optimizer.lr=0.0001 seed=2", "3 of 3, optimizer.lr=0.1 seed=2"]
    assert best in more.output
    record = more.cwd / "s" / "optimizer.lr=0.1" / "run.json"
    record.write_text(record.read_text().replace(json.loads(record.read_text())["code"]["source"], "0" * 16))
    again = start(*command, "seed=1,2").finish()
    assert "sweep: 0 jobs, 1 at once; 6 have finished before, 1 of them with other code" in again.output
    assert re.search("^state .* source +run$", again.output, re.MULTILINE)


def test_a_folder_of_another_sweep_and_a_sweep_inside_the_ranks_of_a_launcher_are_refused(start, tmp_path):
    (tmp_path / "s").mkdir()
    with open(tmp_path / "s" / ".lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # as a sweep that runs holds it
        run = start(*PYTHON_TRAIN, *SHORT, "-m", "hydra.sweep.dir=s", "seed=1,2").finish(2)
    assert "another sweep holds s (" in run.sentence
    assert "wait for its end, or type hydra.sweep.dir=" in run.sentence
    run = start(*PYTHON_TRAIN, "-m", "seed=1,2", RANK=0, WORLD_SIZE=2).finish(2)
    assert run.sentence.endswith("; leave environment out, and type launch=torchrun")


def test_a_job_whose_folder_cannot_be_written_goes_on_when_it_can(start, tmp_path):
    """With a folder of configs and a class of the user's. The table tells what the job has told."""
    (tmp_path / "conf").mkdir()
    net = "def net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    (tmp_path / "nets.py").write_text(f"from torch import nn\n{net}")
    words = ["model._target_=nets.net", "--config-dir=conf", "trainer.max_steps=2", "hydra.sweep.dir=a b"]
    logs = tmp_path / "a b" / "seed=2" / "logs"
    logs.parent.mkdir(parents=True)
    logs.write_text("a file where a folder should be")
    run = start(*PYTHON_TRAIN, "-m", *words, "seed=1,2", "launch=fork", PYTHONPATH=".").finish(1)
    assert "sweep: 1 finished, 1 refused" in run.output
    told = re.findall(r"^(?:lockstep|refused): +(?:seed=2: )?(the run folder .*)$", run.output, re.MULTILINE)
    assert (len(told), len({*told})) == (2, 1)
    logs.unlink()
    (typed,) = re.findall(r"^go on with: .* (-m .*)\n", run.output, re.MULTILINE)
    more = start(*PYTHON_TRAIN, *shlex.split(typed), PYTHONPATH=".").finish()
    assert "sweep: job 1 of 1, seed=2\n" in more.output


def test_the_end_has_the_means_of_its_jobs(start, tmp_path):
    words = ["-m", "model=mlp", "trainer.epochs=1", "optimizer.lr=0.1,0.02", "seed=1,2,3", "hydra.sweep.dir=s"]
    output, found = start(*PYTHON_TRAIN, *words).finish().output, objectives(tmp_path / "s")
    end = output[output.index("\nsweep: 6 finished") :]
    for rate in ("0.1", "0.02"):
        values = [value for name, value in found.items() if f"lr={rate}," in name]
        low, high = stats.t.interval(0.95, 2, sum(values) / 3, stats.sem(values))
        row = rf"^finished +([\d.]+) ± ([\d.]+) .* {rate} .*1,2,3 +s \(3 runs\)$"
        ((mean, half),) = re.findall(row, end, re.MULTILINE)
        assert float(mean) == pytest.approx(sum(values) / 3, abs=5e-5)
        assert float(half) == pytest.approx((high - low) / 2, rel=5e-2)
    assert re.search(r"^best: +optimizer\.lr=0\.1$", end, re.MULTILINE)
