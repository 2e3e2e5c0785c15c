"""A mode: mode._target_=my_mode.Confused +mode.snapshot=last resume=<run>"""

import torch

from lockstep.modes.base import Mode, TrainedRun


class Confused(Mode):
    """Prints how many test samples of each class the net takes for another class."""

    name = "confused"

    def __init__(self, snapshot: str) -> None:
        self.snapshot = snapshot

    def run(self, trained: TrainedRun) -> None:
        wrong = torch.zeros(10, device=trained.world.device)
        with trained.run.averaged_weights(), torch.no_grad():
            net = trained.run.model.eval()
            for part in trained.loader("test").evaluation(128):
                wrong += torch.bincount(part.targets[net(part.inputs).argmax(1) != part.targets], minlength=10)
        trained.world.all_reduce_sum(wrong)
        if trained.world.is_rank_zero:
            print("confused:", wrong.int().tolist())
