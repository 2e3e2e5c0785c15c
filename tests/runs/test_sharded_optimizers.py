"""Optimizers of torch under strategy=fsdp: one process's numbers, also over a resume at another number of ranks."""

import shutil
from pathlib import Path

from support.configs import composed
from support.worlds import distance, in_world, train_all, weights

OPTIMIZERS = ["Adadelta", "Adagrad", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop"]
OPTIONS = {"ASGD": ["+optimizer.t0=2"], "RMSprop": ["optimizer.momentum=0.9", "+optimizer.centered=true"]}
# 7 samples a batch are 3, 2 and 2 on 3 ranks, of which two hold nothing of the last layer.
SMALL = ["dataset=random", "dataset.samples=21", "model=mlp", "model.width=7", "model.depth=1", "model.dropout=0"]
SMALL += ["trainer.batch_size=7", "trainer.epochs=3", "trainer.precision=fp64", "scheduler=constant", "logger=[]"]
SMALL += ["strategy=fsdp", "strategy.wrap_min_parameters=1"]


def trained(folder: Path, ranks: int, steps: int) -> None:
    configs = [
        composed(
            *SMALL, f"optimizer._target_=torch.optim.{name}", "optimizer.lr=0.05", *OPTIONS.get(name, []),
            f"trainer.max_steps={steps}", f"run_dir={folder / name}",
        )
        for name in OPTIMIZERS
    ]  # fmt: skip
    in_world(ranks, train_all, configs)


def test_optimizers_of_torch_step_on_parts_as_on_whole_weights(tmp_path: Path) -> None:
    alone, together, moved = (tmp_path / name for name in ("alone", "together", "moved"))
    trained(alone, 1, 3)
    shutil.copytree(alone, moved)
    for folder, ranks in ((alone, 1), (moved, 3)):
        trained(folder, ranks, 7)
    trained(together, 3, 7)
    for name in OPTIMIZERS:
        for folder in (moved, together):
            assert distance(weights(alone / name), weights(folder / name)) < 1e-12, (folder, name)
