"""How often a snapshot is saved: `snapshot.every`."""

import re
import time

from lockstep.errors import ConfigError


class SaveInterval:
    """ "1epochs", "50steps" or "10min"; a unit alone means 1. Raises ConfigError for anything else.

    unit: "epoch", "step" or "min".
    """

    def __init__(self, every: str) -> None:
        match = re.fullmatch(r"(\d+)?\s*(epoch|step|min)s?", str(every))
        count = int(match[1] or 1) if match else 0
        if match is None or count == 0:
            raise ConfigError(
                f"snapshot.every={every} is not an interval; type snapshot.every=1epochs, 50steps or 10min"
            )
        self.count, self.unit = count, match[2]
        self.last_step = 0
        self.last_time = time.monotonic()

    def due_after_step(self, step: int) -> bool:
        """Whether a multiple of the interval lies in the steps since the last call. Some strategies report several."""
        due = self.unit == "step" and step // self.count > self.last_step // self.count
        self.last_step = step
        return due

    def due_after_epoch(self, epoch: int) -> bool:
        """Whether `epoch`, the number of whole epochs done, ends an interval."""
        return self.unit == "epoch" and epoch % self.count == 0

    def due_by_clock(self) -> bool:
        """True once per interval of minutes. The ranks' clocks differ, so they vote on it."""
        due = self.unit == "min" and time.monotonic() - self.last_time >= 60 * self.count
        if due:
            self.last_time = time.monotonic()
        return due
