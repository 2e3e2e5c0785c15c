"""A logger: '+logger.lines={_target_: my_logger.JSONLinesLogger}'

What must not come twice after a kill is dropped in `start`, as lockstep.loggers.base.CSVLogger does.
"""

import json
from pathlib import Path

from lockstep.loggers.base import Logger, RunInfo


class JSONLinesLogger(Logger):
    """Appends one JSON object for each call to metrics.jsonl in the run folder. An epoch comes through `log`, too."""

    def start(self, info: RunInfo) -> None:
        self.path = Path(info.run.config.run_dir) / "metrics.jsonl"

    def log(self, metrics: dict[str, float], step: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
