"""Finds hangs. In each rank the thread that hears signals calls `Watchdog.look` once a second.

A hang is a silence of all ranks of a machine. Then one of them asks the others, which write their stacks and
collectives into the folder that they share, and looks at all of them from outside. It exchanges what it knows with
other machines through the store, finds the verdict, and ends the ranks of its machine or prints it.
"""

import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.compat import flight_records
from lockstep.errors import EXIT_HANG, print_line
from lockstep.failures import verdict as verdicts
from lockstep.failures.record import STACK_SIGNAL, Place, Record, heartbeat, last_lines, read, read_place
from lockstep.failures.report import ENDED, claim, leave, process_state
from lockstep.failures.verdict import Facts, Verdict
from lockstep.files import is_users, write_whole

log = logging.getLogger(__name__)

SILENCE = 120.0  # seconds, for watch.timeout=null
# How many times longer other phases may be silent than a training or an evaluation; and a first step, in which are
# imports, compilation and the start of loader workers.
PATIENCE = {"train": 1.0, "evaluation": 1.0, "prepare": 30.0, "disk": 30.0}
OTHER_PATIENCE = 10.0
BACKEND_SHARE = 0.8  # of backend.timeout: after it, the ranks' own errors hide the cause
LONGEST_LOOK = 1.1  # seconds that the time between two looks counts: the rest, the process was stopped
# To tell a rank that computes from one that waits: what it uses of the CPU in so many seconds. On a busy machine its
# main thread gets some milliseconds, and uses none while it waits. Other threads may log, so that their share counts.
COMPUTING_SECONDS, MAIN_SECONDS, ALL_SHARE = 0.4, 0.004, 0.2
ANSWER_SECONDS, STACK_SECONDS, MACHINES_SECONDS, END_SECONDS = 10.0, 1.0, 12.0, 2.0
FRESH_SECONDS = 60.0  # facts of another machine that are older tell of an earlier hang
MUTE = dict.fromkeys(ENDED, verdicts.GONE) | {"T": verdicts.STOPPED}  # why a process in this state does not answer
ASK, END = "ask", "end"  # folders: a rank examines its machine, and gets the others' answers; it has found a hang
LOADERS = ("/torch/utils/data/", "/lockstep/data/")


@dataclass
class Watchdog:
    """Looks after the ranks of this machine. world: see lockstep.distributed.world. open_store: opens what all machines
    share, once it is needed. timeout, on_hang: of the config's `watch`. show: prints a verdict that ends the run, where
    no launcher does."""

    world: Any
    open_store: Callable[[], Any]
    timeout: float | None
    on_hang: str
    show: Callable[[Record], None] | None
    places: dict[int, Place] = field(default_factory=dict)
    silence: float = 0.0
    last_look: float = field(default_factory=time.monotonic)
    next_examination: float = 0.0
    told: str = ""

    def look(self, now: float) -> None:
        """now: of time.monotonic()."""
        self.silence += min(now - self.last_look, LONGEST_LOOK)
        self.last_look = now
        if (places := self._places()) != self.places:
            self.places, self.silence, self.next_examination = places, 0.0, 0.0
        if (folder := heartbeat.folder) is not None:  # do what another rank of this machine asks for
            if (folder / END).exists():
                os._exit(EXIT_HANG)
            answer = folder / ASK / f"rank{self.world.rank}"
            if answer.parent.exists() and not answer.exists():
                self.next_examination = self.silence + self.limit(first_step=1.0)
                with suppress(OSError):  # it is too late
                    write_whole(answer, json.dumps(self._own()), sync=False)
        if self.silence > max(self.limit(first_step=1.0), self.next_examination):
            self.examine()
            self.last_look = time.monotonic()

    def _places(self) -> dict[int, Place]:
        folder = heartbeat.folder
        return {rank: read_place(folder, rank) if folder else heartbeat.place for rank in self.world.here}

    def limit(self, waits: bool = True, first_step: float = OTHER_PATIENCE) -> float:
        """Seconds of silence that are no hang. waits: whether a rank waits for another one, which backend.timeout ends.
        first_step: how many times longer it may take; 1 for when a line says where it is, and the run goes on."""
        if self.places[self.world.rank].name == "end":
            return math.inf
        patience = max(PATIENCE.get(one.name, OTHER_PATIENCE) for one in self.places.values() if one.name != "end")
        if not any(one.step for one in self.places.values()):
            patience = max(patience, first_step)
        seconds = patience * (self.timeout or SILENCE)
        if patience > OTHER_PATIENCE or not waits:  # in these phases ranks may wait longer than backend.timeout
            return seconds
        return min(seconds, max(BACKEND_SHARE * float(self.world.timeout), self.timeout or 0.0))

    def _own(self) -> list[Any]:
        """What no other rank can see: the stack of this one's main thread, and its collectives."""
        walked = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0])
        stack = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]
        return [stack, verdicts.parse_calls(flight_records())]

    def examine(self) -> None:
        """Explain the silence of the ranks of this machine, if no other one of them does that now."""
        if heartbeat.folder is not None and not claim(heartbeat.folder / ASK):
            return
        facts = [Facts(*one) for one in sorted(self._facts_everywhere(self._facts_here()))]
        silence, self.next_examination = self.silence, self.silence + self.limit(first_step=1.0)
        if self._places() == self.places:  # else they were only slow
            self._judge(facts, verdicts.find_verdict(facts, self.world.size), silence)
        if heartbeat.folder is not None:
            (heartbeat.folder / ASK).rename(heartbeat.folder / f"asked {time.time_ns()}")

    def _judge(self, facts: list[Facts], verdict: Verdict, silence: float) -> None:
        """End the run if it hangs, or tell what it waits for. silence: seconds without progress."""
        rows, limit = verdicts.table(facts, verdict), self.limit(any(rank.waits for rank in facts))
        text = f"lockstep: no rank has made progress for {silence:.0f} s, and the run"
        if verdict.kind == verdicts.SLOW or silence <= limit:
            text += f" goes on: {verdict.meaning}"
        elif self.on_hang == "stop" and verdict.ends:
            self._end(facts, verdict, {"silent_seconds": round(silence, 1), "table": rows})
        else:
            lines = [" is not ended", *rows, f"verdict: {verdict.kind}", f"what it means: {verdict.meaning}"]
            text += "\n".join([*lines, f"what to do: {verdict.advice}"])
        if verdict.kind == verdicts.SLOW:  # silence counts from the end of a compilation, or of a debugger
            self.silence = self.next_examination = 0.0
        if self.told != (told := f"{verdict.kind} {verdict.ranks} {self.places}"):
            self.told = told
            log.warning("%s", text)
            if self.world.rank:  # the log of rank 0 is on the screen
                print_line(text, sys.stderr)

    def _facts_here(self) -> list[list[Any]]:
        """`Facts` of the ranks of this machine that have not ended well: what they answer, and what is seen of them."""
        here, folder = self.world.here, heartbeat.folder or Path()
        asked = [rank for rank, place in self.places.items() if place.name != "end"]
        answers, deadline = {self.world.rank: self._own()}, time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            silent = [rank for rank in asked if rank not in answers and process_state(here[rank]) not in (*MUTE, "t")]
            if not silent:
                break
            time.sleep(0.05)
            texts = {rank: read(folder / ASK / f"rank{rank}") for rank in silent}
            answers |= {rank: json.loads(text) for rank, text in texts.items() if text}
        busy, found = computing([here[rank] for rank in asked]), list[list[Any]]()
        for rank in asked:
            pid, worker, (stack, calls) = here[rank], 0, answers.get(rank, ([], []))
            state = process_state(pid)
            mute = "" if rank in answers else MUTE.get(state, verdicts.NO_ANSWER)
            if mute == verdicts.NO_ANSWER and state != "t":
                stack = self._stack_of(rank, pid)
            elif any(part in file for file, *_ in stack for part in LOADERS):
                of_workers = ((child, self._stack_of(rank, child)) for child in children(pid))
                in_users_code = (one for one in of_workers if any(is_users(file) for file, *_ in one[1]))
                worker, stack = next(in_users_code, (0, stack))
            host, place = heartbeat.record["host"], self.places[rank]
            found.append([rank, host, pid, place, pid in busy, mute, worker, stack, calls])
        return found

    def _stack_of(self, rank: int, pid: int) -> list[Any]:
        """What faulthandler writes of a rank, or of a process of its loader, without Python's lock."""
        alone, text = Path(f"/proc/self/fd/{heartbeat.stacks.fileno()}"), ""
        path = heartbeat.folder / f"rank{rank}.stacks" if heartbeat.folder else alone
        with suppress(OSError, TypeError), path.open(errors="replace") as file:
            caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
            if caught is None or not int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1:  # the signal would end it
                return []
            file.seek(0, os.SEEK_END)
            os.kill(pid, STACK_SIGNAL)
            deadline = time.monotonic() + STACK_SECONDS
            while not text and time.monotonic() < deadline:
                time.sleep(0.1)  # it is written whole by then
                text = file.read()
        return verdicts.parse_stack(text)

    def _facts_everywhere(self, known: list[list[Any]]) -> list[list[Any]]:
        """With those of the other machines, as far as these tell theirs soon."""
        others, deadline = {*self.world.machines} - {min(self.world.here)}, time.monotonic() + MACHINES_SECONDS
        if not others:
            return known
        with suppress(Exception):  # the store is lost, with its machine
            store = self.open_store()
            store.set(f"hang/{min(self.world.here)}", json.dumps([time.time(), known]))
            while others and time.monotonic() < deadline:
                for rank in [rank for rank in others if store.check([f"hang/{rank}"])]:
                    told_at, facts = json.loads(store.get(f"hang/{rank}"))
                    if time.time() - told_at < FRESH_SECONDS:
                        known, others = known + facts, others - {rank}
                time.sleep(0.1)
        return known

    def _end(self, facts: list[Facts], verdict: Verdict, seen: Record) -> None:
        """End the ranks of this machine: one that hangs leaves no other trace of its cause."""
        cause = next((rank for rank in facts if rank.rank in verdict.ranks), facts[0])
        record, others = heartbeat.record, [pid for rank, pid in self.world.here.items() if rank != self.world.rank]
        run_log = re.sub(r"rank\d+\.log$", f"rank{cause.rank}.log", record["log"] or "")
        failure = record | {"rank": cause.rank, "host": cause.host, "pid": cause.pid, "phase": cause.phase} | seen
        failure |= {"kind": "hang", "time": time.time(), "is_echo": False, "log": run_log, "verdict": verdict.kind}
        failure |= {"step": cause.place.step, "epoch": cause.place.epoch, "log_lines": last_lines(run_log)}
        failure |= {"ranks": [*verdict.ranks], "meaning": verdict.meaning, "advice": verdict.advice}
        failure["stacks"] = {rank.rank: [*map(str, rank.stack)] for rank in facts}
        if heartbeat.folder is not None:
            write_whole(heartbeat.folder / f"rank{cause.rank}.hang.json", json.dumps(failure), sync=False)
        if self.show is not None:
            self.show(failure)
        if heartbeat.folder is not None:
            claim(heartbeat.folder / END)
        started = [child for pid in (*others, os.getpid()) for child in children(pid)]  # they would go on without it
        for doomed in (started, others):
            for pid in doomed:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + END_SECONDS
            while any(process_state(pid) not in ENDED for pid in others) and time.monotonic() < deadline:
                time.sleep(0.02)
        if self.show is not None:
            leave()
        os._exit(EXIT_HANG)


def children(pid: int) -> list[int]:
    """The processes that any thread of `pid` has started."""
    with suppress(OSError):
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return sorted(int(child) for text in lists for child in text.split())
    return []


def computing(pids: list[int]) -> set[int]:
    """Those that compute, or that have started a process which does."""
    families = {pid: [pid, *children(pid)] for pid in pids}
    before = {one: cpu_seconds(one) for family in families.values() for one in family}
    time.sleep(COMPUTING_SECONDS)

    busy = set[int]()
    for one, then in before.items():
        of_main, of_all = (after - at_first for after, at_first in zip(cpu_seconds(one), then, strict=True))
        is_running = process_state(one) in ("R", "t")  # or waits for a core, or is in a debugger
        if is_running or of_main > MAIN_SECONDS or of_all > ALL_SHARE * COMPUTING_SECONDS:
            busy.add(one)
    return {pid for pid, family in families.items() if busy.intersection(family)}


def cpu_seconds(pid: int) -> tuple[float, float]:
    """(of the main thread, of all threads in steps of 0.01)."""
    with suppress(OSError, IndexError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        main = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
        return int(main) / 1e9, (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0, 0.0
