"""strategy=fsdp: a net that is larger than the memory of a rank is built, trained, saved, resumed and exported."""

from pathlib import Path

import pytest

from support.commands import PYTHON_TRAIN
from support.run_folders import read_log
from support.worlds import distance, weights

pytestmark = pytest.mark.drill

TESTS = Path(__file__).parents[1]
LIMIT = 850  # MB of a process's own memory, beyond what it has when it begins to build the model
FOUR = ["launch=fork", "launch.nproc_per_node=4", f"+model.limit={LIMIT}"]
LAYERS = 14  # of 38 MB: 528 MB of weights and as much of gradients, together more than the limit
NET = [
    *PYTHON_TRAIN, "dataset=random", "dataset.features=3072", "dataset.samples=16",
    "model=mlp", "model._target_=support.models.layers_within",
    f"model.depth={LAYERS}", "trainer.batch_size=8", "optimizer.momentum=0", "optimizer.nesterov=false",
    "scheduler=constant", "logger=[]", "evaluation.batch_size=16", "snapshot.keep_last=1",
]  # fmt: skip


@pytest.mark.timeout(2500)
def test_a_net_larger_than_the_limit_of_a_rank_trains_with_the_numbers_of_one_process(start, tmp_path):
    limited = [*FOUR, "strategy=fsdp", "hydra.run.dir=parts"]
    for epochs in (1, 2):
        start(*NET, *limited, f"trainer.epochs={epochs}", PYTHONPATH=TESTS).finish(limit=700)
    assert "resumed from" in read_log(tmp_path / "parts")
    names = [path.name[:11] for path in (tmp_path / "parts" / "snapshots").glob("step_*/*.safetensors")]
    assert sorted(set(names)) == [f"shard-0000{rank}" for rank in (1, 2, 3, 4)]
    whole = ["+model.limit=null", "hydra.run.dir=whole"]
    start(*NET, *whole, "trainer.epochs=2", PYTHONPATH=TESTS).finish(limit=700)
    assert distance(weights(tmp_path / "whole"), weights(tmp_path / "parts")) < 1e-6
    too_large = start(*NET, *FOUR, "strategy=ddp", PYTHONPATH=TESTS).finish(None)
    assert too_large.process.returncode != 0
    assert "memory" in too_large.output
