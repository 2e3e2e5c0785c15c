"""The monitor as a process: ranks that end before it starts, a launcher that dies, ranks in a container."""

import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from lockstep.failures import channel
from lockstep.failures.channel import Reader, send
from lockstep.failures.report import MonitorOptions
from lockstep.failures.start import run_monitor
from support.commands import ROOT, wait_for

CONNECTS = "import os, sys; from lockstep.failures import reporter; reporter.connect('{name}', {rank}, {size}); "
CONNECTS += "reporter.set_run('{run_dir}', 'log'); "
RAISES = CONNECTS + "reporter.failed({error})"
WAITS = CONNECTS + "sys.stdin.read()"  # until the test closes its input


@pytest.fixture
def name() -> str:
    """Of a monitor's address on this machine."""
    return uuid.uuid4().hex


def start_rank(program: str, name: str, run_dir: Path, rank: int = 0, size: int = 1, *before: str, **values: str):
    code = program.format(name=name, rank=rank, size=size, run_dir=run_dir, **values)
    return subprocess.Popen([*before, sys.executable, "-c", code], cwd=ROOT / "src", stdin=subprocess.PIPE)


def wait_for_report(reader: Reader) -> dict | None:
    deadline = time.monotonic() + 60
    while (answer := reader.wait_for("report")) is None and time.monotonic() < deadline:
        pass
    return answer


def report_in(folder: Path) -> dict:
    wait_for((folder / "failure.json").exists, "report", 20)
    return json.loads((folder / "failure.json").read_text())


def test_a_monitor_that_starts_late_still_hears_of_ranks_that_have_ended(name, tmp_path):
    """As on a busy machine: all messages lie in its socket before it runs."""
    with channel.listen(channel.address_of(name)) as listener:
        launcher = channel.connect(channel.address_of(name), timeout=2)
        assert launcher is not None
        send(launcher, {"launcher": True})
        rank = start_rank(RAISES, name, tmp_path, error="ValueError('lost')")
        rank.communicate()
        send(launcher, {"exit_codes": {str(rank.pid): 1}})
        run_monitor(listener, MonitorOptions())
    answer = wait_for_report(Reader(launcher))
    assert answer is not None
    assert answer["report"]["first"]["message"] == "lost"
    send(launcher, {"over": True})
    launcher.close()


def test_a_monitor_that_starts_late_hears_all_ranks_before_it_blames_one(name, tmp_path):
    errors = ["__import__('torch').distributed.DistBackendError('rank 1 is gone')", "ValueError('the cause')"]
    with channel.listen(channel.address_of(name)) as listener:
        for rank, error in enumerate(errors):
            start_rank(RAISES, name, tmp_path, rank, 2, error=error).communicate()
        run_monitor(listener, MonitorOptions())
    report = report_in(tmp_path)
    assert (report["first"]["rank"], report["first"]["message"]) == (1, "the cause")
    assert [other["rank"] for other in report["consequences"]] == [0]


def test_a_rank_in_a_container_of_its_own_is_left_alone(name, tmp_path):
    if subprocess.run(["unshare", "--pid", "--fork", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs root, for a PID namespace of its own")
    with channel.listen(channel.address_of(name)) as listener:
        rank = start_rank(WAITS, name, tmp_path, 0, 1, "unshare", "--pid", "--fork")
        run_monitor(listener, MonitorOptions())
    time.sleep(2)
    assert not (tmp_path / "failure.json").exists()
    assert rank.poll() is None
    rank.communicate()
    wait_for(lambda: channel.connect(channel.address_of(name), timeout=0) is None, "end of the monitor", 20)


# Its forked rank has a copy of all that is open in the launcher, and does not end by SIGTERM.
LAUNCHER = """
import os, signal, time
from lockstep.failures import reporter
from lockstep.failures.start import MonitorLink
link = MonitorLink(None)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reporter.connect(link.name, 0, 1)
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_forked_ranks_end_after_a_killed_launcher():
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], cwd=ROOT / "src", stdout=subprocess.PIPE, text=True)
    with launcher.stdout:
        rank = Path("/proc", launcher.stdout.readline().strip())
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not rank.exists(), "end of the rank", 20)


SHOWS_COMMAND = "from lockstep.failures.start import whole_command as whole; print(ascii(whole('python')))"


def whole_command_under(name: str, *words: str) -> str:
    """What `whole_command` finds in a process whose parent is called `name` and has these words."""
    script = f'{sys.executable} -c "{SHOWS_COMMAND}"; true'
    parent = [name, "-c", script, *words]
    return subprocess.run(
        parent, executable="/bin/bash", cwd=ROOT / "src", capture_output=True, text=True, check=True
    ).stdout


def test_a_value_that_mpirun_hands_to_its_ranks_is_in_no_report():
    shown = whole_command_under("mpirun", "-x", "WANDB_API_KEY=hunter2", "-x", "MASTER_ADDR=node0", "lr=0.1")
    assert shown.endswith("'-x', 'WANDB_API_KEY', '-x', 'MASTER_ADDR=node0', 'lr=0.1']\n")
    assert "hunter2" not in shown


def test_a_parent_whose_words_are_no_text_ends_no_run():
    assert "folder-\\ufffd" in whole_command_under("mpirun", "folder-\udcff")


def test_a_monitor_that_cannot_be_started_ends_no_run():
    script = (
        "import os, resource\n"
        "from lockstep.failures.report import MonitorOptions\n"
        "from lockstep.failures.start import start_monitor\n"
        "if os.geteuid() == 0:\n"
        "    os.setuid(65534)  # the limit does not hold for root\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n"
        f"start_monitor('{uuid.uuid4().hex}', MonitorOptions())\n"
        "print('goes on')\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT / "src")
    assert found.stdout == "goes on\n", found.stderr
