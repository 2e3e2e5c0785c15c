"""launch=dry: start nothing, and show what a job of that many ranks would do."""

from lockstep.launchers.base import Launcher, refuse_nesting


class DryLauncher(Launcher):
    """ranks: of the job that is planned, each on a machine of its own. `lockstep.dry_run` plans it."""

    runs_elsewhere = True
    plans = True

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def validate(self) -> None:
        refuse_nesting("dry")

    def num_ranks(self) -> tuple[int, int]:
        return self.ranks, 1
