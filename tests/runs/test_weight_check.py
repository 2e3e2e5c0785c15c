"""Weights that differ between ranks are found, named, and kept out of snapshots."""

import pytest

from lockstep.errors import RanksDiffer
from support.commands import STARTERS, ema
from support.configs import composed
from support.digits import FEW
from support.small_text import small_gpt
from support.worlds import in_world, train

SMALL = ["model=mlp", "model.width=16", "logger=[]", FEW, "trainer.batch_size=16", "trainer.epochs=2"]


def damaged(rank, at_step, parameter, change):
    options = {"rank": rank, "at_step": at_step, "parameter": parameter, "change": change}
    words = ["optimizer._target_=support.damage.DamagedSGD", "++optimizer.fused=null"]
    return [*words, *(f"+optimizer.{key}={value}" for key, value in options.items())]


def train_all(configs):
    """The sentence of each run that ends with RanksDiffer, and "" for the others. Such a run is the last one of its
    ranks."""
    sentences = []
    for cfg in configs:
        try:
            train(cfg)
            sentences.append("")
        except RanksDiffer as error:
            sentences.append(str(error))
    return sentences


def test_a_damaged_weight_of_one_rank_is_named_and_kept_out_of_snapshots(tmp_path):
    saves = "snapshot.every=12steps"
    rows = {
        "first": [*damaged(0, 14, 3, "bit"), saves, "watch.weights_every=10"],
        "off": [*damaged(1, 3, 1, 5.0), "watch.weights_every=0"],
        "whole": [*damaged(1, 1000, 1, 5.0), "watch.weights_every=1", ema(0.9)],
        "save": [*damaged(2, 7, 0, 5.0), saves, "watch.weights_every=1000"],
    }
    first, *others = [composed(f"run_dir={tmp_path / name}", *SMALL, *words) for name, words in rows.items()]
    for (stopped,) in in_world(3, train_all, [first]):
        assert stopped.startswith(
            "the weights differ between ranks at step 20: rank 1 has other values in 4.bias than rank 0; rank 2 has "
            "other values in 4.bias than rank 0; type the command again to go on from the last snapshot"
        )
    for *went_on, save in in_world(3, train_all, others):
        assert save.startswith("the weights differ between ranks at step 12: rank 2 has other values in 1.weight than")
        assert went_on == ["", ""]
    assert sorted(path.name for path in (tmp_path / "first" / "snapshots").iterdir()) == ["step_00000012"]
    assert not list((tmp_path / "save").glob("snapshots/*/state.pt"))


@pytest.mark.parametrize(("strategy", "parameter"), [("fsdp", "1.weight than rank"), ("tensor_parallel", "block1.at")])
def test_copies_of_a_part_are_compared(tmp_path, strategy, parameter):
    words = [f"strategy={strategy}", "strategy.replicate=2", "watch.weights_every=2", f"run_dir={tmp_path / 'run'}"]
    if strategy == "fsdp":
        words += [*SMALL, *damaged(3, 2, 0, "bit")]
    else:
        text = small_gpt(tmp_path, "trainer.precision=fp32")
        words = [word for word in text if word != "optimizer=adamw"] + words + damaged(3, 2, 3, "bit")
    for (sentence,) in in_world(4, train_all, [composed(*words)]):
        said = f"the weights differ between ranks at step 2: rank 3 has other values in {parameter}"
        assert sentence.startswith(said)


def test_two_ranks_stop_and_the_command_ends_with_one_sentence(start):
    run = start(*STARTERS["launch=fork"], "watch.weights_every=5", *SMALL, *damaged(1, 6, 1, 5.0)).finish(1)
    assert "rank 1 has other values in 1.bias than rank 0" in run.sentence
    assert "Traceback" not in run.output
