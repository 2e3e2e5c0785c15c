"""What strategies do beside the numbers of one process, which test_same_numbers.py has: a snapshot moves between all of
them, a server has workers, devices get uneven shares, and what a strategy cannot train is refused on all ranks."""

import os
import signal

import pytest
import torch
from torch import nn

from lockstep.errors import StoppedEarly
from lockstep.snapshots.files import list_snapshots
from lockstep.strategies.one_process import UnevenDataParallel
from support.commands import ema, wait_for
from support.configs import composed
from support.digits import PAIRS_ON_TEST
from support.event_files import scalars
from support.models import WithConstants
from support.run_folders import newest_snapshot
from support.worlds import distance, in_world, refusals, train, train_all, weights

SMALL = [PAIRS_ON_TEST, "dataset=random", "dataset.samples=61", "model=mlp", "trainer.batch_size=16"]
SMALL += ["trainer.precision=fp64", "trainer.epochs=2", "optimizer=adamw", "optimizer.fused=false", ema(0.8)]
SERVER = "strategy=async_parameter_server"


def stop_after_two_steps(cfg):
    """Train two or three steps: be asked to stop after the second."""
    from lockstep.distributed.signals import stop_requested
    from lockstep.training import exchange
    from lockstep.training.step import Step

    exchange.PAUSE = 0.0  # an exchange in every step
    update, steps = Step.update, []

    def update_and_ask(step):
        update(step)
        steps.append(step.progress.step + 1)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(stop_requested, "signal")  # a busy machine delivers it late

    Step.update = update_and_ask
    with pytest.raises(StoppedEarly):
        train(cfg)
    assert 2 <= len(steps) <= 3  # the vote is counted in the next step, or in an evaluation before it
    return str(cfg.strategy["_target_"].rpartition(".")[2])


def test_a_snapshot_moves_between_strategies_and_world_sizes(tmp_path):
    moving = [*SMALL, "trainer.max_grad_norm=0.3", "monitor=val/loss", "scheduler=one_cycle", "logger=[]"]
    moving += ["trainer.epochs=8"]  # 32 steps, and five stops after up to 6
    ((objective,),) = in_world(1, train_all, [composed(f"run_dir={tmp_path / 'whole'}", *moving)])
    cfg = [f"run_dir={tmp_path / 'moved'}", *moving]
    stops = [("data_parallel", 1, "DataParallel"), ("ddp", 3, "DDP"), ("fsdp", 4, "Sharded")]
    for strategy, size, name in [*stops, ("tensor_parallel", 4, "Sharded"), ("pipeline", 2, "Pipeline")]:
        more = ["strategy.parallelize_plan=[{1:colwise},{4:rowwise}]"] if strategy == "tensor_parallel" else []
        more += [f"strategy.{'replicate' if strategy == 'fsdp' else 'shard'}=2"] if size == 4 else []
        assert in_world(size, stop_after_two_steps, composed(*cfg, f"strategy={strategy}", *more)) == [name] * size
        newest = list_snapshots(tmp_path / "moved" / "snapshots")[0]
        files = list(newest.glob("*.safetensors")) or list(newest.glob("state_*.pt"))  # whole layers of another rank
        writers = {"data_parallel": 0, "ddp": 0, "pipeline": 1}.get(strategy, 2)  # of replicas the first saves
        assert len(files) == (4 if (strategy, size) == ("tensor_parallel", 4) else writers)
    answers = in_world(2, train, composed(*cfg))
    saved = newest_snapshot(tmp_path / "moved")
    assert list(saved["optimizer"]) == list(saved["model"])
    assert answers == [pytest.approx(objective, rel=1e-9)] * 2
    assert distance(weights(tmp_path / "whole"), weights(tmp_path / "moved")) < 1e-9


def steps_between_synchronisations(configs):
    """Trainings in this rank -> after which steps of each the ranks synchronised."""
    from lockstep.strategies.async_server import ServedStep

    bring, found = ServedStep._bring_weights, []

    def noted(step, after):
        found[-1].append(after)
        bring(step, after)

    ServedStep._bring_weights = noted
    for cfg in configs:
        found.append([])
        train(cfg)
    return found


def test_an_asynchronous_server_with_one_worker_is_one_process_and_sends_every_type_exactly(tmp_path):
    same = [*SMALL, "trainer.gradient_accumulation_steps=2", "trainer.max_grad_norm=0.5", "trainer.max_steps=7"]
    served = composed(*same, SERVER, "strategy.sync_every=3", "logger=[]", f"run_dir={tmp_path / 'served'}")
    constants = ["dataset=random", "model=linear", "model._target_=support.models.WithConstants", "optimizer=adamw"]
    constants += [SERVER, "trainer.max_steps=3", "logger=[]", ema(0.9)]  # which leaves an infinite mask as it is
    in_world(1, train_all, [composed(*same, "logger=[]", f"run_dir={tmp_path / 'alone'}")])
    configs = [served, composed(*constants, f"run_dir={tmp_path / 'constants'}")]
    for steps, _ in in_world(2, steps_between_synchronisations, configs):
        assert steps == [3, 4, 6, 7]  # an epoch has four steps
    assert distance(weights(tmp_path / "alone"), weights(tmp_path / "served")) < 1e-12
    saved = torch.load(tmp_path / "constants" / "model.pt", weights_only=True)
    WithConstants([saved["layer.weight"].shape[1]], 1).assert_constant(saved)
    assert saved["seen"] == 3 * 64


def test_with_two_workers_every_step_is_taken_and_all_ranks_evaluate_the_same_weights(tmp_path):
    answers = in_world(3, train_all, [composed(*SMALL, SERVER, "logger=[tensorboard]", f"run_dir={tmp_path}")])
    assert answers[0] == answers[1] == answers[2]
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [4, 8]


def test_the_first_gpu_may_take_fewer_samples():
    """In their order; a GPU without samples is left out."""
    for samples, devices, first_share, sizes in ((7, 1, 0.5, [7]), (10, 4, 0.5, [1, 3, 3, 3]), (1, 3, 0.1, [1])):
        layer = UnevenDataParallel(nn.Linear(1, 1), first_share)
        sent, options = layer.scatter((torch.arange(samples).view(-1, 1), len), None, ["cpu"] * devices)
        assert [len(batch) for batch, _ in sent] == sizes
        assert torch.cat([batch for batch, _ in sent]).flatten().tolist() == list(range(samples))
        assert {own for _, own in sent} == {len}  # the outputs function of a second pass
        assert len(options) == len(sizes)


class InOrderOfRanks(nn.Module):
    """The rank decides which of two layers of one shape comes first, as a router of experts may by its samples."""

    def __init__(self, shape, classes):
        super().__init__()
        self.pair = nn.ModuleList([nn.Linear(shape[0], shape[0]) for _ in range(2)])
        self.last = nn.Linear(shape[0], classes)

    def forward(self, inputs):
        first, second = self.pair if torch.distributed.get_rank() == 0 else reversed(self.pair)
        outputs = self.last(first(inputs).relu() + second(inputs).sigmoid())
        return outputs


WORDS = ["model=linear", "model._target_=support.models.Words", "~model.shape", "~model.classes", "+model.sparse=true"]
ORDER = ["dataset=random", "model=linear", f"model._target_={__name__}.InOrderOfRanks", "strategy=fsdp"]
ORDER += ["strategy.wrap_min_parameters=1"]
REPLACES = ["callbacks=[{_target_: support.damage.Replaces}]", "logging.every=1", "model=mlp"]
REFUSED = [
    (["strategy=pipeline", "model=resnet18"], "type model=convnet"),
    (["strategy=pipeline", "model=linear"], "type model=mlp"),
    (WORDS, "several ranks add up dense gradients"),
    ([ema(0.9), *REPLACES], "is another tensor now than when trainer.ema began to average it; change it in place"),
    (ORDER, "the same blocks in the same order on all ranks, in all steps; type strategy=ddp"),
]


def test_what_a_strategy_cannot_train_is_refused_by_all_ranks_with_what_to_type(tmp_path):
    configs = [composed(*words, "logger=[]", f"run_dir={tmp_path / str(n)}") for n, (words, _) in enumerate(REFUSED)]
    for sentences in in_world(2, refusals, configs):
        for (words, said), sentence in zip(REFUSED, sentences, strict=True):
            assert said in sentence, words
