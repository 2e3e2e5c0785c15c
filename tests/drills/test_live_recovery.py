"""launch.recover=live: ranks are killed at random moments, the others go on, and not a bit differs at the end."""

import os
import random
import signal
import statistics
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from lockstep.errors import EXIT_FAILED, EXIT_KILLED, EXIT_RESUMABLE
from support.commands import PYTHON_TRAIN, ROOT, Command, ranks_under, wait_for
from support.deaths import MOMENTS
from support.event_files import MEASURED, scalars
from support.live_ranks import all_ranks, lost_pids, pauses, rank_zero, ranks_in, recoveries, wait_for_spare
from support.run_folders import assert_one_curve, has_logged, read_log
from support.worlds import same_bits

pytestmark = pytest.mark.drill

KILLS = int(os.environ.get("LOCKSTEP_KILLS", "5"))  # in each of the runs below
PHASES = ("meeting", "train", "evaluation", "snapshot")
TRAINING = [
    *PYTHON_TRAIN,
    "launch=fork",
    "launch.nproc_per_node=3",
    "launch.recover=live",
    "launch.replace_within=100",  # a world that gets smaller has other bits
    "model=mlp",
    "model.width=256",
    "trainer.batch_size=32",
    f"trainer.epochs={30 + KILLS}",
    "trainer.deterministic=true",
]
RUNS = {
    # Longer than the others: ranks are also stopped after the kills, and the run must not have ended by then.
    "launch=fork": ["trainer.ema=0.9", "snapshot.every=7steps", f"trainer.epochs={2 * (30 + KILLS)}"],
    "launch=spawn": ["evaluation.batch_size=4", "snapshot.every=3steps"],
    "launch=torchrun": ["strategy=virtual_ranks", "strategy.count=3", "snapshot.every=7steps"],
}


def kill_in(phase: str, run: Command, folder: Path, alone: bool = False) -> int:
    """Kill a rank in `phase`, rank 0 every third time, and sometimes another one within 50 ms. Returns how many.

    alone: no other one.
    """
    victims: list[int] = []
    deadline = time.monotonic() + 60
    while not victims and run.process.poll() is None:
        assert time.monotonic() < deadline, f"no rank is in the phase {phase}"
        victims = ranks_in(run.process.pid, phase)
    if run.process.poll() is not None:
        return 0
    pid = rank_zero(folder) if (folder / ".lock").exists() and random.random() < 1 / 3 else random.choice(victims)
    others = [other for other in all_ranks(run.process.pid) if other != pid]
    victims = [pid, *random.sample(others, 0 if alone else random.choice([0, 0, 1]))]
    for victim in victims:
        time.sleep(random.uniform(0, 0.05) if victim != pid else 0)
        with suppress(ProcessLookupError):  # the run has just ended
            os.kill(victim, signal.SIGKILL)
    return len(victims)


def kill_until_the_end(run: Command, folder: Path) -> dict[str, int]:
    """Kill ranks in each phase in turn, whenever the run has recovered. Returns {phase: killed ranks}."""
    killed = dict.fromkeys(PHASES, 0)
    while (sum(killed.values()) < KILLS or not all(killed.values())) and run.process.poll() is None:
        phase = min(PHASES, key=lambda name: killed[name])
        before = recoveries(folder)
        meets_again = phase == "meeting" and any(killed.values())
        if meets_again:  # after another death. Of three ranks one must be left that has the state
            killed["train"] += kill_in("train", run, folder, alone=True)
        killed[phase] += kill_in(phase, run, folder, alone=meets_again)
        wait_for(lambda before=before: recoveries(folder) > before or run.process.poll() is not None, "recovery")
        time.sleep(random.uniform(0, 0.5))
    return killed


def stop_while_ranks_meet(run: Command, folder: Path) -> None:
    """Kill a rank, and stop another one for longer than the ranks take to connect: they have to do it again."""
    before, victims = recoveries(folder), []
    kill_in("train", run, folder)
    deadline = time.monotonic() + 60
    while not victims:
        assert time.monotonic() < deadline, "no rank is in the phase meeting"
        victims = ranks_in(run.process.pid, "meeting")
    os.kill(victims[0], signal.SIGSTOP)
    time.sleep(3)
    os.kill(victims[0], signal.SIGCONT)
    wait_for(lambda: recoveries(folder) > before, "recovery")


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All curves, without the times that a run takes."""
    return {tag: curve for tag, curve in scalars(folder).items() if not tag.startswith(MEASURED)}


def assert_curves_agree(one: Path, other: Path) -> None:
    """Up to the order of sums."""
    first, second = curves(one), curves(other)
    assert first.keys() == second.keys()
    for tag in first:
        assert [step for step, _ in first[tag]] == [step for step, _ in second[tag]], tag
        assert [value for _, value in first[tag]] == pytest.approx([value for _, value in second[tag]], rel=1e-5), tag


@pytest.mark.timeout(900 + 30 * KILLS)
@pytest.mark.parametrize("launch", RUNS)
def test_killed_ranks_cost_no_restart_and_no_bit(start, tmp_path, launch):
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "disturbed"
    options = [*TRAINING, *RUNS[launch], launch]
    start(*options, f"hydra.run.dir={undisturbed}").finish()
    run = start(*options, f"hydra.run.dir={folder}")
    killed = kill_until_the_end(run, folder)
    measured = pauses(folder)
    if launch == "launch=fork":
        stop_while_ranks_meet(run, folder)
    run.finish()
    print(
        f"\n{launch:16} kills in {', '.join(f'{phase}: {number}' for phase, number in killed.items())}   "
        f"pause: median {statistics.median(measured):.2f} s, longest {max(measured):.2f} s"
    )
    assert min(killed.values()) >= 1
    assert "resumed from" not in read_log(folder)
    assert same_bits(undisturbed, folder)
    assert curves(undisturbed) == curves(folder)
    assert_one_curve(folder)
    assert len(scalars(folder)["recovery/seconds"]) == recoveries(folder)
    assert len(lost_pids(folder)) == run.output.count("ended (exit -9)")


@pytest.mark.timeout(120 + 5 * KILLS)
def test_with_a_spare_at_hand_the_pause_is_short(start, tmp_path):
    """Two ranks, so that each has a core of a small machine. Alone on it, the median is below 0.3 s."""
    folder = tmp_path / "run"
    quiet = "logger=[tensorboard]"  # a line for each epoch would fill the pipe of the test, and the run would wait
    run = start(*TRAINING, quiet, "launch.nproc_per_node=2", "trainer.epochs=10000", f"hydra.run.dir={folder}")
    wait_for(lambda: ranks_in(run.process.pid, "train"), "first step")
    victims = []
    for number in range(KILLS):
        wait_for_spare(run.process.pid)
        victim = rank_zero(folder) if number % 2 else random.choice(all_ranks(run.process.pid))
        victims.append(victim)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda number=number: recoveries(folder) > number, "recovery")
    run.send(signal.SIGTERM)
    run.finish(EXIT_RESUMABLE)
    measured = pauses(folder)
    print(f"\n{len(measured)} kills   pause: median {statistics.median(measured):.2f} s, longest {max(measured):.2f} s")
    assert len(measured) == KILLS
    assert lost_pids(folder) == set(victims)
    assert statistics.median(measured) < 1.5  # a machine that does other work, too


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "virtual_ranks"])
def test_without_a_spare_the_world_gets_smaller_and_grows_again(start, tmp_path, strategy):
    undisturbed, folder, no_memory = tmp_path / "undisturbed", tmp_path / "disturbed", tmp_path / "no_memory"
    options = ["launch.replace_within=1", "dataset.train._target_=support.deaths.mortal_digits", f"strategy={strategy}"]
    options += ["strategy.count=3"] if strategy == "virtual_ranks" else ["+trainer.batch_size_per_rank=11"]
    options += ["trainer.precision=fp64", "trainer.epochs=60"]
    start(*TRAINING, *options, f"hydra.run.dir={undisturbed}", PYTHONPATH=ROOT / "tests").finish()
    run = start(*TRAINING, *options, f"hydra.run.dir={folder}", PYTHONPATH=ROOT / "tests")
    wait_for(lambda: has_logged(folder, "epoch 1/"), "first epoch")
    no_memory.touch()
    for pid in all_ranks(run.process.pid)[:2]:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: has_logged(folder, "the ranks go on as "), "smaller world")
    no_memory.unlink()
    wait_for(lambda: recoveries(folder), "new rank")
    run.finish()
    assert "resumed from" not in read_log(folder)
    sizes = [size for _, size in scalars(folder)["recovery/ranks"]]
    assert min(sizes) < sizes[-1] == 3
    weights, expected = (torch.load(path / "model.pt", weights_only=True) for path in (folder, undisturbed))
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-9, atol=1e-9)
    assert same_bits(undisturbed, folder) == (strategy == "virtual_ranks")
    assert_curves_agree(undisturbed, folder)


def test_a_death_while_the_others_build_or_finish_is_no_failure(start, tmp_path):
    dying = ["model._target_=support.deaths.dying_mlp", "trainer.epochs=2"]
    dying += ["+logger.dying._target_=support.deaths.DyingAtEnd"]
    run = start(*TRAINING, *dying, "hydra.run.dir=disturbed", PYTHONPATH=ROOT / "tests").finish()
    assert all((tmp_path / moment).exists() for moment in MOMENTS)
    start(*TRAINING, *dying, "hydra.run.dir=undisturbed", PYTHONPATH=ROOT / "tests").finish()
    assert run.output.count("takes its place") == len(MOMENTS)
    assert not (tmp_path / "disturbed" / "failure.json").exists()
    assert same_bits(tmp_path / "undisturbed", tmp_path / "disturbed")


def test_after_the_death_of_all_ranks_new_ones_resume_from_the_snapshot(start, tmp_path):
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "disturbed"
    start(*TRAINING, "trainer.epochs=10", f"hydra.run.dir={undisturbed}").finish()
    run = start(*TRAINING, "trainer.epochs=10", f"hydra.run.dir={folder}")
    wait_for(lambda: has_logged(folder, "epoch 3/"), "third epoch")
    for pid in ranks_under(run.process.pid):
        os.kill(pid, signal.SIGKILL)
    run.finish()
    assert "resumed from" in read_log(folder)
    assert same_bits(undisturbed, folder)
    assert_one_curve(folder)


def broken_model(folder: Path, what_rank_1_does: str) -> list[str]:
    """Write a model whose rank 1 does something else in its first training step. Returns the overrides for it."""
    (folder / "broken.py").write_text(
        "import os, time\n"
        "from torch import nn\n"
        "from lockstep.models.mlp import mlp\n"
        "class Broken(nn.Module):\n"
        "    def forward(self, x):\n"
        "        if self.training and os.environ.get('RANK') == '1':\n"
        f"            {what_rank_1_does}\n"
        "        return x\n"
        "def broken(shape, classes, width, depth, dropout):\n"
        "    return nn.Sequential(Broken(), mlp(shape, classes, width, depth, dropout))\n"
    )
    return ["model._target_=broken.broken", "hydra.run.dir=run"]


def test_a_rank_that_dies_at_the_same_step_again_and_again_ends_the_run(start, tmp_path):
    options = broken_model(tmp_path, "os.abort()")
    run = start(*TRAINING, *options, PYTHONPATH=tmp_path).finish(code=EXIT_KILLED)
    assert "rank 1" in run.output


def test_an_error_of_a_connection_of_the_users_own_ends_the_run(start, tmp_path):
    options = broken_model(tmp_path, "raise ConnectionError('Connection closed by peer')")
    run = start(*TRAINING, *options, PYTHONPATH=tmp_path).finish(code=EXIT_FAILED)
    assert "ConnectionError: Connection closed by peer\n  at broken.py:" in run.output


def test_a_killed_launcher_leaves_no_rank_that_hangs(start, tmp_path):
    options = broken_model(tmp_path, "time.sleep(3600)")
    run = start(*TRAINING, *options, PYTHONPATH=tmp_path)
    wait_for(lambda: ranks_in(run.process.pid, "train"), "first step")
    processes = [Path(f"/proc/{pid}") for pid in ranks_under(run.process.pid)]
    time.sleep(1)  # until rank 1 sleeps
    run.process.kill()
    wait_for(lambda: not any(path.exists() for path in processes), "end of all ranks", limit=30)
