"""What a net changes in an evaluation is not seen by the training, whatever the ranks and the batches are."""

from pathlib import Path

import torch

from zoo.combinations import Combination, Zoo


def test_buffers_and_weights_that_an_evaluation_changes_are_put_back(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    chosen = [
        Combination("AlwaysCounting", "tensors", "one", after="resume"),
        Combination("AlwaysCounting", "tensors", "two", equal="small evaluations"),
        Combination("EmbeddedMaxNorm", "tensors", "one"),
    ]
    wrong = [outcome for outcome in Zoo(tmp_path).outcomes(chosen, at_once=1) if outcome.result != "equal"]
    assert not wrong, "\n".join(f"{outcome.combination}\n{outcome.why}" for outcome in wrong)
