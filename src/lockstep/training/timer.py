"""The interface by which the training loop tells a profiler which phase of a step begins."""

PHASES = ("data", "forward", "backward", "gradient_sync", "optimizer", "logging")


class StepTimer:
    """Measures nothing. The profiler overrides these methods; the loop calls them in every step."""

    def phase(self, name: str) -> None:
        """The phase `name`, one of PHASES, begins, and the one before ends."""

    def step_end(self, full_steps_left: int) -> None:
        """A step has ended, logging included. `full_steps_left`: steps with whole batches left in this epoch."""

    def epoch_end(self) -> None:
        """The epoch's last step has ended. Whatever is still being measured ends now."""
