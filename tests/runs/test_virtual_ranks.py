"""strategy=virtual_ranks: the same bits at every world size."""

import pytest
import torch

from support.configs import composed, with_values
from support.models import WithConstants
from support.run_folders import newest_snapshot
from support.worlds import in_world, same_bits, train_all

SHORT = ["strategy=virtual_ranks", "strategy.count=8", "optimizer=adamw", "trainer.epochs=1", "trainer.max_steps=5"]
SHORT += ["scheduler=constant", "trainer.batch_size=61", "logger=[]"]
CONSTANTS = ["dataset=random", "model=linear", "model._target_=support.models.WithConstants"]
MODELS = {
    "batch norm": ["model=convnet"],
    "dropout": ["model=mlp", "model.dropout=0.3"],
    "constants": [*CONSTANTS, "parameters.freeze=[unused]"],
}


@pytest.mark.whole
def test_any_number_of_ranks_and_stops_end_in_identical_bits(tmp_path, train):
    bases = {name: composed(*SHORT, *model) for name, model in MODELS.items()}
    stopped, spawn = tmp_path / "stopped", ["launch=spawn", "launch.nproc_per_node=2", "trainer.max_steps=2"]
    for size, last in ((1, 1), (2, 2), (8, 5)):
        runs = [with_values(cfg, f"run_dir={tmp_path / name / str(size)}") for name, cfg in bases.items()]
        goes_on = with_values(bases["batch norm"], f"run_dir={stopped}", f"trainer.max_steps={last}")
        in_world(size, train_all, [*runs, *([goes_on] if size != 2 else [])])
        if size == 2:  # another launcher
            train(*SHORT, *MODELS["batch norm"], *spawn, f"hydra.run.dir={stopped}")
        assert all(same_bits(tmp_path / name / "1", tmp_path / name / str(size)) for name in MODELS), size
    assert same_bits(tmp_path / "batch norm" / "1", stopped)
    moments, expected = (newest_snapshot(run)["optimizer"] for run in (stopped, tmp_path / "batch norm" / "1"))
    assert all(torch.equal(moments[name][key], value) for name in expected for key, value in expected[name].items())
    saved = torch.load(tmp_path / "constants" / "2" / "model.pt", weights_only=True)
    WithConstants([saved["layer.weight"].shape[1]], 1).assert_constant(saved)
    assert saved["seen"] == 5 * 7  # of the last virtual rank: 61 samples in five parts of 8 and three of 7
