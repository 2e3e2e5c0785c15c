"""Finds hangs. In each rank the thread that hears signals calls `Watchdog.look` once a second.

A hang is a silence of all ranks of a machine. Then one of them asks the others, which write their stacks and
collectives into the folder that they share, and looks at all of them from outside. It exchanges what it knows with
other machines through the store, finds the verdict, and ends the ranks of its machine or prints it.
"""

import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.compat import flight_records
from lockstep.errors import EXIT_HANG
from lockstep.failures import verdict as verdicts
from lockstep.failures.record import STACK_SIGNAL, Heartbeat, Place, last_lines, read_place
from lockstep.failures.report import ENDED, claim, leave, process_state
from lockstep.failures.verdict import Facts, Verdict
from lockstep.files import write_whole
from lockstep.source_code import is_users

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

SILENCE, NEVER = 120.0, 1e9  # seconds: for watch.timeout=null
# How many times longer other phases may be silent than a training or an evaluation. The rendezvous has its own limit.
PATIENCE = {"train": 1.0, "evaluation": 1.0, "prepare": 30.0, "disk": 30.0, "meeting": NEVER}
OTHER_PATIENCE = FIRST_STEP_PATIENCE = 10.0  # of a first step: imports, compilation, the start of loader workers
BACKEND_SHARE = 0.8  # of backend.timeout: after it, the ranks' own errors hide the cause
LONGEST_LOOK = 1.1  # seconds that the time between two looks counts: the rest, the process was stopped
# To tell a rank that computes from one that waits: what it uses of the CPU in so many seconds. On a busy machine its
# main thread gets some milliseconds, and uses none while it waits. Other threads may log, so that their share counts.
COMPUTING_SECONDS, MAIN_SECONDS, ALL_SHARE = 0.4, 0.004, 0.2
ANSWER_SECONDS, STACK_SECONDS, MACHINES_SECONDS, END_SECONDS = 10.0, 1.0, 12.0, 2.0
FRESH_SECONDS = 60.0  # facts of another machine that are older tell of an earlier hang; so does a question
ASK, END = "ask", "end"  # files of a rank that examines its machine, while it does, and when it has found a hang
LOADERS = ("/torch/utils/data/", "/lockstep/data/")


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
        self.rank, self.folder = int(heartbeat.record["rank"]), heartbeat.folder
        self.places: dict[int, Place] = {}
        self.silence, self.last_look, self.next_examination = 0.0, time.monotonic(), 0.0
        self.told, self.asked_at = "", 0  # when the question that this rank has answered was asked
        self.store: Store | None = None

    def look(self, now: float) -> None:
        """now: of time.monotonic()."""
        self.silence += min(now - self.last_look, LONGEST_LOOK)
        self.last_look = now
        if (places := self._places()) != self.places:
            self.places, self.silence, self.next_examination = places, 0.0, 0.0
        if self.folder is not None:
            self._answer(self.folder)
        if self.silence > max(self.limit(first_step=1.0), self.next_examination):
            self.examine()
            self.last_look = time.monotonic()

    def _places(self) -> dict[int, Place]:
        return {rank: read_place(self.folder, rank) if self.folder else self.heartbeat.place for rank in self.ranks}

    def limit(self, waits: bool = True, first_step: float = FIRST_STEP_PATIENCE) -> float:
        """Seconds of silence that are no hang. waits: whether a rank waits for another one, which backend.timeout ends.
        first_step: how many times longer it may take; 1 for when a line says where it is, and the run goes on."""
        if self.places[self.rank].name == "end":
            return NEVER
        phases = [place.name for place in self.places.values() if place.name != "end"]
        patience = max(PATIENCE.get(phase, OTHER_PATIENCE) for phase in phases)
        if not any(place.step for place in self.places.values()):
            patience = max(patience, first_step)
        if patience > OTHER_PATIENCE or not waits:  # in these phases no rank waits in a collective
            return self.timeout * patience
        return min(self.timeout * patience, max(BACKEND_SHARE * self.backend_timeout, self.typed))

    def _answer(self, folder: Path) -> None:
        """Do what another rank of this machine asks for: tell what it cannot see, or end."""
        if (folder / END).exists():
            os._exit(EXIT_HANG)
        with suppress(OSError):  # nobody asks
            asked_at = (folder / ASK).stat().st_mtime_ns
            if time.time() - asked_at / 1e9 > FRESH_SECONDS:  # the rank that has asked has ended
                (folder / ASK).unlink()
            elif asked_at != self.asked_at:
                self.asked_at, self.next_examination = asked_at, self.silence + self.limit(first_step=1.0)
                write_whole(folder / f"rank{self.rank}.facts", json.dumps([asked_at, *self._own()]), sync=False)

    def _own(self) -> list[Any]:
        """The stack of this rank's main thread, and its collectives."""
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        walked = [(frame.f_code, line) for frame, line in traceback.walk_stack(main)] if main else []
        texts = [text.decode() for text in flight_records()]
        calls = verdicts.parse_calls(texts, self.heartbeat.place.values)
        return [[(code.co_filename, line, code.co_name) for code, line in walked], calls]

    def examine(self) -> None:
        """Explain the silence of the ranks of this machine, if no other one of them does that now."""
        if self.folder is not None and not claim(self.folder / ASK):
            return
        facts = [Facts(*one) for one in sorted(self._facts_everywhere(self._facts_here()))]
        silence, self.next_examination = self.silence, self.silence + self.limit(first_step=1.0)
        if self._places() == self.places:  # else they were only slow
            self._judge(facts, verdicts.find_verdict(facts, self.world_size), silence)
        if self.folder is not None:
            (self.folder / ASK).unlink(missing_ok=True)

    def _judge(self, facts: list[Facts], verdict: Verdict, silence: float) -> None:
        """End the run if it hangs, or tell what it waits for. silence: seconds without progress."""
        rows, limit = verdicts.table(facts, verdict), self.limit(any(rank.waits for rank in facts))
        lines = [f"lockstep: no rank has made progress for {silence:.0f} s, and the run is not ended", *rows]
        lines += [f"verdict: {verdict.kind}", f"what it means: {verdict.meaning}", f"what to do: {verdict.advice}"]
        if verdict.kind == verdicts.SLOW or silence <= limit:
            lines = [f"lockstep: no rank has made progress for {silence:.0f} s, and the run goes on: {verdict.meaning}"]
        elif self.on_hang == "stop" and verdict.ends:
            self._end(facts, verdict, {"silent_seconds": round(silence, 1), "table": rows})
        if verdict.kind == verdicts.SLOW:  # silence counts from the end of a compilation, or of a debugger
            self.silence = self.next_examination = 0.0
        if self.told != (told := f"{verdict.kind} {verdict.ranks} {self.places}"):
            self.told = told
            log.warning("%s", "\n".join(lines))
            with suppress(OSError, ValueError):
                if self.rank:  # the log of rank 0 is on the screen
                    print("\n".join(lines), file=sys.stderr, flush=True)

    def _facts_here(self) -> list[list[Any]]:
        """`Facts` of the ranks of this machine that have not ended well: what they answer, and what is seen of them."""
        answers, asked = {self.rank: self._own()}, [rank for rank, place in self.places.items() if place.name != "end"]
        self.asked_at = (self.folder / ASK).stat().st_mtime_ns if self.folder else 0
        deadline = time.monotonic() + ANSWER_SECONDS
        while missing := [rank for rank in asked if rank not in answers]:
            for rank in missing:
                with suppress(OSError, ValueError):
                    asked_at, *answer = json.loads(Path(self.folder or "", f"rank{rank}.facts").read_text())
                    answers |= {rank: answer} if asked_at == self.asked_at else {}
            can_answer = [rank for rank in missing if process_state(self.ranks[rank]) not in (*ENDED, "T", "t")]
            if not can_answer or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        found = []
        for rank in asked:
            pid, worker, (stack, calls) = self.ranks[rank], 0, answers.get(rank, ([], []))
            state = process_state(pid)
            mute = verdicts.GONE if state in ENDED else verdicts.STOPPED if state == "T" else verdicts.NO_ANSWER
            if rank in answers:
                mute = ""
                if any(part in file for file, *_ in stack for part in LOADERS):
                    of_workers = ((child, self._stack_of(rank, child)) for child in children(pid))
                    in_users_code = (one for one in of_workers if any(is_users(file) for file, *_ in one[1]))
                    worker, stack = next(in_users_code, (0, stack))
            elif mute == verdicts.NO_ANSWER and state != "t":
                stack = self._stack_of(rank, pid)
            found.append([rank, self.heartbeat.record["host"], pid, self.places[rank], pid, mute, worker, stack, calls])
        busy = computing([self.ranks[rank] for rank in asked])  # after the stacks, which cost some
        return [[*known[:4], known[2] in busy, *known[5:]] for known in found]

    def _stack_of(self, rank: int, pid: int) -> list[Any]:
        """What faulthandler writes of a rank, or of a process of its loader, without Python's lock."""
        path = (
            self.folder / f"rank{rank}.stacks"
            if self.folder
            else Path(f"/proc/self/fd/{self.heartbeat.stacks.fileno()}")
        )
        with suppress(OSError, TypeError), path.open("rb") as file:
            caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
            if STACK_SIGNAL is None or caught is None or not int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1:
                return []  # the signal would end it
            file.seek(0, os.SEEK_END)
            os.kill(pid, STACK_SIGNAL)
            text, deadline = b"", time.monotonic() + STACK_SECONDS
            while not text and time.monotonic() < deadline:
                time.sleep(0.05)
                text = file.read()
            time.sleep(0.05)  # until it is written whole
            return verdicts.parse_stack((text + file.read()).decode(errors="replace"))
        return []

    def _facts_everywhere(self, known: list[list[Any]]) -> list[list[Any]]:
        """With those of the other machines, as far as these tell theirs soon."""
        others, deadline = {*self.machines} - {min(self.ranks)}, time.monotonic() + MACHINES_SECONDS
        with suppress(Exception):  # the store is lost, with its machine
            if others:
                self.store = self.store or self.open_store()
                self.store.set(f"hang/{min(self.ranks)}", json.dumps([time.time(), known]))
            while others and self.store and time.monotonic() < deadline:
                for rank in [rank for rank in others if self.store.check([f"hang/{rank}"])]:
                    told_at, facts = json.loads(self.store.get(f"hang/{rank}"))
                    if time.time() - told_at < FRESH_SECONDS:
                        known, others = known + facts, others - {rank}
                time.sleep(0.1)
        return known

    def _end(self, facts: list[Facts], verdict: Verdict, seen: dict[str, Any]) -> None:
        """End the ranks of this machine: one that hangs leaves no other trace of its cause."""
        cause = next((rank for rank in facts if rank.rank in verdict.ranks), facts[0])
        record, others = self.heartbeat.record, [pid for rank, pid in self.ranks.items() if rank != self.rank]
        run_log = re.sub(r"rank\d+\.log$", f"rank{cause.rank}.log", record["log"] or "")
        failure = record | {"rank": cause.rank, "host": cause.host, "pid": cause.pid, "phase": cause.phase} | seen
        failure |= {"kind": "hang", "time": time.time(), "is_echo": False, "ranks": [*verdict.ranks]}
        failure |= {
            "step": cause.place.step,
            "epoch": cause.place.epoch,
            "log": run_log,
            "log_lines": last_lines(run_log),
        }
        failure |= {"verdict": verdict.kind, "meaning": verdict.meaning, "advice": verdict.advice}
        failure["stacks"] = {str(rank.rank): [*map(str, rank.stack)] for rank in facts}
        if self.folder is not None:
            write_whole(self.folder / f"rank{cause.rank}.hang.json", json.dumps(failure), sync=False)
        if self.show is not None:
            self.show(failure)
        if self.folder is not None:
            claim(self.folder / END)
        started = [child for pid in (*others, os.getpid()) for child in children(pid)]  # they would go on without it
        deadline = time.monotonic() + END_SECONDS
        while any(process_state(pid) not in ENDED for pid in others) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in (*started, *others):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if self.show is not None:
            self.heartbeat.enter("end")
            leave(self.folder)
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

    def computes(pid: int) -> bool:
        of_main, of_all = (now - then for now, then in zip(cpu_seconds(pid), before[pid], strict=True))
        is_running = process_state(pid) in ("R", "t")  # or waits for a core, or is in a debugger
        return is_running or of_main > MAIN_SECONDS or of_all > ALL_SHARE * COMPUTING_SECONDS

    return {pid for pid, family in families.items() if any(map(computes, family))}


def cpu_seconds(pid: int) -> tuple[float, float]:
    """(of the main thread, of all threads in steps of 0.01)."""
    with suppress(OSError, IndexError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        main = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
        return int(main) / 1e9, (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0, 0.0
