"""mode=evaluate: the metrics of a trained run, on any data and any number of ranks."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.modes.base import Mode, TrainedRun
from lockstep.modes.output import require_folder, write_output

if TYPE_CHECKING:
    from lockstep.strategies.base import JobSpec

log = logging.getLogger(__name__)


class Evaluate(Mode):
    """Evaluates as training does: with averaged weights if there are any, each sample counted once.

    split: "test" or "train", whose samples are not augmented. file: where the numbers go; None: evaluation.json in the
    run folder.
    """

    name = "evaluate"

    def __init__(self, snapshot: str, split: str, file: str | None) -> None:
        self.snapshot, self.split, self.file = snapshot, split, file

    def validate(self, job: "JobSpec") -> None:
        require_folder(self.file, "mode.file")

    def run(self, trained: TrainedRun) -> dict[str, float]:
        """Returns {metric: mean over all samples}, the same on every rank."""
        from lockstep.training.loop import evaluate

        loader = trained.loader(self.split)
        metrics = evaluate(trained.state, loader)
        facts: dict[str, Any] = {
            "metrics": metrics,
            "split": self.split,
            "samples": len(loader),
            "snapshot": str(trained.snapshot),
            "step": trained.step,
            "ranks": trained.world.size,
        }
        path = Path(self.file) if self.file is not None else trained.folder / "evaluation.json"
        write_output(trained.world, path, [json.dumps(facts, indent=1), "\n"], "mode.file")
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        log.info("evaluated: %s %s, over %d samples at step %d", self.split, shown, len(loader), trained.step)
        log.info("written to: %s", path)
        return metrics
