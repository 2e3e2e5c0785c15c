"""Finds hangs. In each rank the thread that hears signals calls `Watchdog.look` once a second.

A hang is a silence of all ranks of a machine. Then one of them asks the others, which write the facts about themselves
into the folder that they share, and looks at those that do not answer. It exchanges all with other machines through the
store, finds the verdict, and ends the ranks of its machine or prints it.
"""

import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.compat import flight_records
from lockstep.errors import EXIT_HANG
from lockstep.failures.processes import ENDED, children, cpu_seconds, process_state
from lockstep.failures.record import STACK_SIGNAL, Heartbeat, Place, last_lines, read_place
from lockstep.failures.report import PRINTED, VERDICT, claim
from lockstep.failures.verdict import (
    GONE,
    LOADERS,
    NO_ANSWER,
    SLOW,
    STOPPED,
    Collective,
    Facts,
    Frame,
    Verdict,
    find_verdict,
    parse_calls,
    parse_stack,
    table,
)  # fmt: skip
from lockstep.files import write_whole
from lockstep.source_code import is_users

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

SILENCE = 120.0  # seconds, for watch.timeout=null
NEVER = 1e9
# How many times longer other phases may be silent than a training or an evaluation. The rendezvous has its own limit.
PATIENCE = {"train": 1.0, "evaluation": 1.0, "prepare": 30.0, "disk": 30.0, "meeting": NEVER}
OTHER_PATIENCE = FIRST_STEP_PATIENCE = 10.0  # of a first step: imports, compilation, the start of loader workers
BACKEND_SHARE = 0.8  # of backend.timeout: after it, the ranks' own errors hide the cause
LONGEST_LOOK = 1.1  # seconds that the time between two looks counts: the rest, the process was stopped
# To tell a rank that computes from one that waits: what it uses of the CPU in so many seconds. On a busy machine its
# main thread gets some milliseconds, and uses none while it waits. Other threads may log, so that their share counts.
COMPUTING_SECONDS, MAIN_SECONDS, ALL_SHARE = 0.4, 0.004, 0.2
ANSWER_SECONDS, WORKERS_SECONDS, STACK_SECONDS, MACHINES_SECONDS, END_SECONDS = 10.0, 5.0, 1.0, 12.0, 2.0
FRESH_SECONDS = 60.0  # facts of another machine that are older tell of an earlier hang; so does a question
ASK = "ask"  # a file of a rank that examines its machine, while it does
LARGEST_STACKS = 2**24  # bytes


class Watchdog:
    """Looks after the ranks of this machine.

    ranks: {rank: pid} of this machine. world_size: of all. heartbeat: of this rank, which shares a folder if it is not
    alone. machines: the lowest rank of each machine. store: opens what all machines share, once it is needed.
    timeout, on_hang: of the config's `watch`. backend_timeout: seconds that ranks wait for each other. show: prints a
    verdict that ends the run, and leaves failure.json, where no launcher does.
    """

    def __init__(
        self,
        ranks: Mapping[int, int],
        world_size: int,
        heartbeat: Heartbeat,
        machines: list[int],
        store: "Callable[[], Store]",
        timeout: float | None,
        on_hang: str,
        backend_timeout: float,
        show: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.ranks, self.world_size, self.heartbeat, self.machines = ranks, world_size, heartbeat, machines
        self.open_store, self.on_hang, self.show = store, on_hang, show
        self.timeout, self.typed, self.backend_timeout = timeout or SILENCE, timeout or 0.0, backend_timeout
        self.rank = int(heartbeat.who["rank"])
        self.places: dict[int, Place] = {}
        self.silence, self.last_look, self.next_examination = 0.0, time.monotonic(), 0.0
        self.told = ""
        self.store: Store | None = None
        self.answered = 0  # when the question that this rank has answered was asked

    def look(self, now: float) -> None:
        """now: of time.monotonic()."""
        self.silence += min(now - self.last_look, LONGEST_LOOK)
        self.last_look = now
        places = {rank: self._place(rank) for rank in self.ranks}
        if places != self.places:
            self.places, self.silence, self.next_examination = places, 0.0, 0.0
        if self.heartbeat.folder is not None:
            self._answer(self.heartbeat.folder)
        if self.silence > max(self.limit(first_step=1.0), self.next_examination):
            self.examine()
            self.last_look = time.monotonic()

    def _answer(self, folder: Path) -> None:
        """Do what another rank of this machine asks for: tell the facts, or end."""
        if (folder / VERDICT).exists():
            os._exit(EXIT_HANG)
        with suppress(OSError):  # nobody asks
            asked_at = (folder / ASK).stat().st_mtime_ns
            if asked_at != self.answered:
                self.answered = asked_at
                self.next_examination = self.silence + self.limit(first_step=1.0)
                write_whole(folder / f"rank{self.rank}.facts", json.dumps(asdict(self._own_facts())), sync=False)

    def _place(self, rank: int) -> Place:
        with suppress(OSError):
            if rank != self.rank and self.heartbeat.folder is not None:
                return read_place(self.heartbeat.folder, rank)
        return self.heartbeat.place

    def limit(self, waits: bool = True, first_step: float = FIRST_STEP_PATIENCE) -> float:
        """Seconds of silence that are no hang. waits: whether a rank waits for another one, which backend.timeout ends.
        first_step: how many times longer it may take; 1 for when a line says where it is, and the run goes on."""
        phases = [place.name for place in self.places.values() if place.name != "end"]
        if self.places[self.rank].name == "end":
            return NEVER
        patience = max(PATIENCE.get(phase, OTHER_PATIENCE) for phase in phases)
        if not any(place.step for place in self.places.values()):
            patience = max(patience, first_step)
        if patience > OTHER_PATIENCE or not waits:  # in these phases no rank waits in a collective
            return self.timeout * patience
        return min(self.timeout * patience, max(BACKEND_SHARE * self.backend_timeout, self.typed))

    def examine(self) -> None:
        """Explain the silence of the ranks of this machine, if no other one of them does that now."""
        folder = self.heartbeat.folder
        if folder is None:
            self._judge([self._own_facts()], self.silence)
            return
        ask, is_ours = folder / ASK, claim(folder / ASK)
        with suppress(OSError):
            if is_ours:
                self._judge(self._facts_everywhere(self._facts_here(folder, ask.stat().st_mtime_ns)), self.silence)
            if is_ours or time.time() - ask.stat().st_mtime > FRESH_SECONDS:  # the rank that has asked has ended
                ask.unlink()

    def _judge(self, facts: list[Facts], silence: float) -> None:
        """End the run if it hangs, or tell what it waits for. silence: seconds without progress."""
        self.next_examination = silence + self.limit(first_step=1.0)
        if {rank: self._place(rank) for rank in self.ranks} != self.places:  # they were only slow
            return
        verdict, limit = find_verdict(facts, self.world_size), self.limit(any(rank.waits for rank in facts))
        rows, is_hang = table(facts, verdict), verdict.kind != SLOW and silence > limit
        if verdict.kind == SLOW:  # silence counts from the end of a compilation, or of a debugger
            self.silence = self.next_examination = 0.0
        if self.on_hang == "stop" and verdict.ends and is_hang:
            self._end(verdict, facts, {"silent_seconds": round(silence, 1), "table": rows})
        first = f"lockstep: no rank has made progress for {silence:.0f} s, and the run"
        lines = [f"{first} goes on: {verdict.meaning}"]
        if is_hang:
            lines = [f"{first} is not ended", *rows, f"verdict: {verdict.kind}"]
            lines += [f"what it means: {verdict.meaning}", f"what to do: {verdict.advice}"]
        if self.told != (told := f"{verdict.kind} {verdict.ranks} {self.places}"):
            self.told = told
            log.warning("%s", "\n".join(lines))
            with suppress(OSError, ValueError):
                if self.rank:  # the log of rank 0 is on the screen
                    print("\n".join(lines), file=sys.stderr, flush=True)

    # The facts of ranks.

    def _own_facts(self) -> Facts:
        """Takes 0.4 s, and more where a loader's workers are asked."""
        workers = children(os.getpid())

        def used() -> list[float]:
            return [time.process_time() - time.thread_time(), _cpu_of_main(), *map(cpu_seconds, workers)]

        before, start = used(), time.monotonic()
        time.sleep(COMPUTING_SECONDS)
        seconds = time.monotonic() - start
        is_running = "R" in map(process_state, (os.getpid(), *workers))  # or waits for a core
        of_all, *others = [now - then for now, then in zip(used(), before, strict=True)]
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = [] if main is None else [(frame, line) for frame, line in traceback.walk_stack(main)]
        stack = tuple(Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames)
        place, worker = self.places[self.rank], 0
        if self.heartbeat.stacks and any(part in frame.file for frame in stack for part in LOADERS):
            worker, stack = self._busy_worker(workers) or (0, stack)
        return Facts(
            rank=self.rank,
            host=self.heartbeat.who["host"],
            pid=os.getpid(),
            phase=place.name,
            step=place.step,
            busy=is_running or of_all > ALL_SHARE * seconds or max(others) > MAIN_SECONDS,
            stack=stack,
            calls=parse_calls([text.decode() for text in flight_records()], place.values),
            worker=worker,
        )

    def _busy_worker(self, workers: list[int]) -> tuple[int, tuple[Frame, ...]] | None:
        """The first loader worker that is in the user's code, and its stack. They are asked one after the other."""
        deadline = time.monotonic() + WORKERS_SECONDS
        for pid in workers:
            stack = self._stack_of(self.heartbeat.stacks.fileno(), pid, "") if time.monotonic() < deadline else ()
            if any(is_users(frame.file) for frame in stack):
                return pid, stack
        return None

    def _stack_of(self, stacks: int, pid: int, main_thread: str) -> tuple[Frame, ...]:
        """The stack that faulthandler writes of a process that answers in no other way, without Python's lock. stacks:
        the descriptor of the file in which it does."""
        if STACK_SIGNAL is None or not _hears(pid, STACK_SIGNAL):
            return ()
        size = os.fstat(stacks).st_size
        with suppress(OSError):
            os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + STACK_SECONDS
        while os.fstat(stacks).st_size == size and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)  # until it is written whole
        return parse_stack(os.pread(stacks, LARGEST_STACKS, size).decode(errors="replace"), main_thread)

    def _facts_here(self, folder: Path, asked_at: int) -> list[Facts]:
        """Those of the ranks of this machine that have not ended well. asked_at: by the clock of the files, in ns."""
        self.answered = asked_at
        found, deadline = {self.rank: self._own_facts()}, time.monotonic() + ANSWER_SECONDS
        asked = {rank for rank, place in self.places.items() if place.name != "end"}
        while (missing := asked - found.keys()) and time.monotonic() < deadline:
            for rank in missing:
                path = folder / f"rank{rank}.facts"
                with suppress(OSError, ValueError):
                    if path.stat().st_mtime_ns >= asked_at:
                        found[rank] = _facts(json.loads(path.read_text()))
            if all(process_state(self.ranks[rank]) in (*ENDED, "T", "t") for rank in asked - found.keys()):
                break
            time.sleep(0.05)
        found |= {rank: self._mute(folder, rank) for rank in asked - found.keys()}
        return [found[rank] for rank in sorted(found)]

    def _mute(self, folder: Path, rank: int) -> Facts:
        """What is known of a rank of this machine that does not answer."""
        pid, place, stack = self.ranks[rank], self._place(rank), tuple[Frame, ...]()
        state = process_state(pid)
        mute = GONE if state in ENDED else STOPPED if state == "T" else NO_ANSWER
        if mute == NO_ANSWER and state != "t":
            with suppress(OSError, ValueError), (folder / f"rank{rank}.stacks").open("rb") as stacks:
                who = json.loads((folder / f"rank{rank}.who").read_text())
                stack = self._stack_of(stacks.fileno(), pid, who["main_thread"])
        before = cpu_seconds(pid)  # after the stack, which costs some
        time.sleep(COMPUTING_SECONDS * (mute == NO_ANSWER))
        computes = process_state(pid) in ("R", "t") or cpu_seconds(pid) - before > MAIN_SECONDS  # or is in a debugger
        host, is_busy = self.heartbeat.who["host"], computes and mute == NO_ANSWER
        return Facts(rank, host, pid, place.name, place.step, mute, is_busy, stack)

    def _facts_everywhere(self, here: list[Facts]) -> list[Facts]:
        """With those of the other machines, as far as these tell theirs soon."""
        others = [rank for rank in self.machines if rank != min(self.ranks)]
        if not others:
            return here
        with suppress(Exception):  # the store is lost, with its machine
            self.store = self.store or self.open_store()
            told = json.dumps({"at": time.time(), "facts": [asdict(rank) for rank in here]})
            self.store.set(f"hang/{min(self.ranks)}", told)
            deadline = time.monotonic() + MACHINES_SECONDS
            while others and time.monotonic() < deadline:
                for rank in [rank for rank in others if self.store.check([f"hang/{rank}"])]:
                    found = json.loads(self.store.get(f"hang/{rank}"))
                    if time.time() - found["at"] < FRESH_SECONDS:
                        here += [_facts(one) for one in found["facts"]]
                        others.remove(rank)
                time.sleep(0.1)
        return sorted(here, key=lambda rank: rank.rank)

    # The end of a hang.

    def _end(self, verdict: Verdict, facts: list[Facts], known: dict[str, Any]) -> None:
        """End the ranks of this machine: one that hangs leaves no other trace of its cause."""
        cause = next((rank for rank in facts if rank.rank in verdict.ranks), facts[0])
        run_log = re.sub(r"rank\d+\.log$", f"rank{cause.rank}.log", self.heartbeat.who["log"] or "")
        known |= {"rank": cause.rank, "host": cause.host, "pid": cause.pid, "phase": cause.phase, "step": cause.step}
        known |= {"kind": "hang", "time": time.time(), "is_echo": False, "epoch": self.places[self.rank].epoch}
        known |= {"log": run_log, "log_lines": last_lines(run_log), "verdict": verdict.kind, "ranks": [*verdict.ranks]}
        known |= {"meaning": verdict.meaning, "advice": verdict.advice}
        known |= {"stacks": {str(rank.rank): [*map(str, rank.stack)] for rank in facts}}
        failure = self.heartbeat.who | known
        folder = self.heartbeat.folder
        if self.show is not None:
            if folder is not None:
                claim(folder / PRINTED)
            self.show(failure)
        if folder is not None:
            write_whole(folder / VERDICT, json.dumps(failure), sync=False)
        others = [pid for rank, pid in self.ranks.items() if rank != self.rank]
        if self.show is not None:  # a launcher ends them itself
            _await_end(others)
        started = [child for pid in (*others, os.getpid()) for child in children(pid)]  # they would go on without it
        for pid in [*started, *others * (self.show is not None)]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if self.show is not None and folder is not None:
            _await_end(others)  # what is killed may still write into the folder
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(EXIT_HANG)


def _await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while any(process_state(pid) not in ENDED for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def _facts(told: dict[str, Any]) -> Facts:
    """The reverse of `asdict`."""
    stack = tuple(Frame(**one) for one in told["stack"])
    calls = tuple(Collective(**one | {"call": tuple(one["call"])}) for one in told["calls"])
    return Facts(**told | {"stack": stack, "calls": calls})


def _cpu_of_main() -> float:
    """The CPU time of the main thread, in seconds; 0 where the system does not tell."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))


def _hears(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would else end it."""
    with suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False
