"""Writes run.json: what was run, and how it goes on. Always there, whatever `logger=` says."""

import hashlib
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.config.record import ConfigRecord
from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.world import World
from lockstep.errors import EXIT_FINISHED, ConfigError, StoppedEarly, TrainingDiverged, exit_code_of
from lockstep.loggers.base import EpochSummary, Logger, RunInfo
from lockstep.runs.record import (
    DIFF,
    FAILED,
    FINISHED,
    KILLED,
    PAUSED,
    RUNNING,
    loaded_code_facts,
    read_run,
    run_exit_code,
    state_of,
    versions,
    write_run,
)
from lockstep.source_code import module_hashes
from lockstep.text import differing

WRITE_SECONDS = 10.0  # at most between two writes while snapshots are saved more often


class RunJson(Logger):
    """One life is one start of the run: from its first step to its end, by one number of ranks.

    The file is written when training starts, at an epoch's end, with snapshots and at the end. What takes some ms, git
    and the versions of packages, is asked in a thread while the first steps run.
    """

    def __init__(self, objective: str, mode: str, is_paused: Callable[[], bool]) -> None:
        """
        objective: such as "val/loss"; where nothing is chosen, test/loss of the last weights.
        mode: "min" or "max".
        is_paused: whether a run that ends shall go on later.
        """
        self.objective, self.mode, self.is_paused = objective, mode, is_paused
        self.run: dict[str, Any] = {}
        self.life: dict[str, Any] | None = None  # begins with the first epoch: a finished run may be started again
        self.tested: dict[str, Any] | None = None  # the test of an earlier start
        self.has_no_end = False  # whether the life before this one was killed
        self.thread: threading.Thread | None = None
        self.written_at = 0.0

    def on_fit_start(self, run: RunInfo) -> None:
        self.folder = run.run_dir
        start = self.start_step = run.facts["life"]["from_step"]  # start_step may be earlier: other loggers get more
        before: dict[str, Any] = {"lives": []}
        with suppress(ConfigError):  # a fresh folder, or a file that is damaged
            before = read_run(run.run_dir)
        self.run = {
            **run.facts,
            "objective": {
                "name": self.objective,
                "mode": self.mode,
                "best": run.best,
                "step": run.best_step,
                "last": None,
            },
            "test": None,
            "lives": [],
            "steps": start,
            "samples_per_second": None,
        }
        if start > 0:
            self.tested = before.get("test")
            self.has_no_end = bool(before["lives"]) and before["lives"][-1]["state"] == RUNNING
            if before["lives"]:
                _complete(before, run.facts["config"])
            self.run["lives"] = [_ended(life, start) for life in before["lives"]]
            began = {key: value for key, value in before.get("data", {}).items() if key in ("init", "resume")}
            self.run["data"] = began | self.run["data"]
            self.run["samples_per_second"] = before.get("samples_per_second")

    def on_epoch_start(self, epoch: int, epochs: int, samples: int, samples_done: int) -> None:
        if self.life is None:
            self._begin_life()

    def _begin_life(self) -> None:
        self.life = self.run.pop("life") | {
            "started": time.time(),
            "ended": None,
            "to_step": self.start_step,
            "state": RUNNING,
            "exit_code": None,
            "source": None,
        }
        self.run["lives"].append(self.life)
        self.thread = threading.Thread(target=self._begin, name="run-record", daemon=True)
        self.thread.start()

    def on_step(self, step: int, samples: int) -> None:
        self.run["steps"] = step

    def on_epoch_end(self, summary: EpochSummary) -> None:
        self.run["steps"] = max(self.run["steps"], summary.step)
        if summary.samples_per_second is not None:
            self.run["samples_per_second"] = round(summary.samples_per_second, 1)
        for best in summary.best.values():
            self.run["objective"] |= {"best": best, "step": summary.best_step}
        self._write()

    def on_test(self, metrics: dict[str, float], step: int, is_logged: bool) -> None:
        """{"step": of the weights, "metrics": {name: number}}, None before."""
        self.run["test"] = {"step": step, "metrics": dict(metrics)}
        if self.life is None and self.run["test"] != self.tested:  # it was stopped or killed before the test
            self._begin_life()

    def flush(self) -> None:
        if time.monotonic() - self.written_at > WRITE_SECONDS:
            self._write()

    def on_fit_end(self, run_dir: object, metrics: dict[str, float]) -> None:
        if self.life is None and self.has_no_end:  # it was killed after its last epoch
            self._begin_life()
        name, tested = self.objective.partition("/")[2], self.run["test"] or {"metrics": {}}
        self.run["objective"]["last"] = metrics.get(name, tested["metrics"].get(name))
        self._end(PAUSED if self.is_paused() else FINISHED, EXIT_FINISHED)

    def on_fit_stop(self, error: BaseException) -> None:
        is_stop = isinstance(error, StoppedEarly | KeyboardInterrupt)
        state = "stopped" if is_stop else "diverged" if isinstance(error, TrainingDiverged) else FAILED
        self._end(state, exit_code_of(error))

    def _end(self, state: str, code: int) -> None:
        if self.life is not None:
            self.life |= {"state": state, "exit_code": code, "ended": time.time()}
            self._write(sync=True)

    def _begin(self) -> None:
        """In the thread: the code as it is now, and the first whole file. A folder without room: see `_write`."""
        facts, diff = loaded_code_facts()
        with suppress(OSError):
            if diff:
                (self.folder / DIFF).write_bytes(diff)
            else:
                (self.folder / DIFF).unlink(missing_ok=True)
        self.run["code"] |= facts | {"modules": module_hashes(users_only=True)}
        if self.life is not None:
            self.life["source"] = facts["source"]
        self.run["environment"] |= versions()
        with suppress(OSError):
            write_run(self.folder, self.run)

    def _write(self, sync: bool = False) -> None:
        if self.life is None:
            return
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.life["to_step"] = self.run["steps"]
        self.written_at = time.monotonic()
        write_run(self.folder, self.run, sync)


def _complete(before: dict[str, Any], config: dict[str, Any]) -> None:
    """Write into the last life of a run what only its end, or this resume, tells.

    Which rank failed first is in the failure report: this one may have seen an error of a rank that was killed. Of its
    config the life keeps what this one, `config`, has changed.
    """
    last = before["lives"][-1]
    last["config"] = {key: then for key, (then, _) in differing(before["config"], config).items()}
    if last["state"] == FAILED:
        last |= {"state": state_of(before), "exit_code": run_exit_code(before)}


def _ended(life: dict[str, Any], step: int) -> dict[str, Any]:
    """An earlier life of the run: what it did after `step` is done again. One that was killed wrote no end."""
    was_killed = life["state"] == RUNNING
    last = step if was_killed else min(life["to_step"], step)
    return life | {"state": KILLED if was_killed else life["state"], "to_step": max(life["from_step"], last)}


def run_facts(
    world: World, step: int, record: ConfigRecord, computed: Sequence[str], data: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain values for run.json, before its first step. A collective.

    step: optimizer steps already done.
    computed: the keys of the config that say what is computed.
    data: the number of samples and a fingerprint of the data.
    """
    config, folder = dict(record.shown), str(record.shown["run_dir"])
    for key, value in config.items():  # loggers name a place in the run folder; equal configs shall have the same hash
        if isinstance(value, str) and (value == folder or value.startswith(f"{folder}/")):
            config[key] = value.replace(folder, "${run_dir}", 1)
    compared = {key: config[key] for key in sorted(computed)}
    config_hash = hashlib.sha256(json.dumps(compared, default=str).encode()).hexdigest()[:16]
    hosts = list(dict.fromkeys(world.all_gather_json(socket.gethostname())))
    device = world.device
    return {
        "command": record.command,
        "flags": list(record.flags),
        "overrides": list(record.overrides),
        "cwd": os.getcwd(),
        "seed": config["seed"],
        "options": {group: option for group, option in record.options.items() if not group.startswith("hydra/")},
        "config": config,
        "config_hash": config_hash,
        "data": dict(data),
        "code": {},
        "environment": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpu": f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        },
        "life": {
            "from_step": step,
            "world_size": world.size,
            "launcher": read_rank_info().started_by,
            "hosts": hosts,
            "config_hash": config_hash,
        },
    }


def _cpu_name() -> str:
    with suppress(OSError), Path("/proc/cpuinfo").open() as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
