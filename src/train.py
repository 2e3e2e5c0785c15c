"""The door of Lockstep, and one rank's whole life.

python src/train.py
torchrun --standalone --nproc_per_node=2 src/train.py backend=gloo trainer.epochs=10
python src/train.py -m launch=torchrun optimizer.lr=0.1,0.01
"""

import hydra
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lockstep import entry, preflight, rendezvous, signals
from lockstep.refusal import Refusal


def make(node, **more):
    """What a config node describes, None for an empty one. The only place where a config becomes an object."""
    try:
        return None if node is None else instantiate(node, _convert_="all", **more)
    except InstantiationException as error:
        raise error.__cause__ if isinstance(error.__cause__, Refusal) else error from None


def work(cfg):
    """One rank's whole life. Returns the last value of cfg.objective, which is what a sweep optimises."""
    # Imported here, not above: `--help` and `--cfg job` answer without torch.
    from lockstep import board, data, lock, loop, snapshot, strategy, world

    trainer = cfg.trainer
    signals.listen()
    with board.logs(cfg.run_dir, rendezvous.read().rank), world.join(**cfg.backend) as ranks, lock.hold(cfg.run_dir, ranks):
        ranks.same_on_all(entry.flat({key: value for key, value in cfg.items() if key != "launch"}), hint="start every rank with the same command")
        loop.settle(cfg.seed, trainer.deterministic)

        with ranks.leader_first():
            make(cfg.dataset.prepare)
        loss = make(cfg.dataset.loss)
        net = loop.place(make(cfg.model), ranks, trainer.precision, trainer.channels_last, trainer.compile)
        net = make(cfg.sync_bn)(net, ranks)
        feed = {"world": ranks, "seed": cfg.seed, "workers": cfg.dataset.workers, "mean": cfg.dataset.mean,
                "std": cfg.dataset.std, "like": next(net.parameters())}  # fmt: skip
        train_data = data.Loader(make(cfg.dataset.train), augment=data.Augment(**cfg.dataset.augment), **feed)
        test_data = data.Loader(make(cfg.dataset.test), **feed)
        batch_size = data.global_batch(ranks.size, trainer.batch_size, trainer.batch_size_per_rank, trainer.accumulate)

        epoch_steps, total_steps = loop.steps(len(train_data), batch_size, trainer.epochs, trainer.max_steps)
        optimizer = make(cfg.optimizer)(net.parameters())
        scheduler = make(cfg.scheduler)(optimizer, epoch_steps, total_steps)
        run = loop.Run(net, optimizer, scheduler, loop.scaler(ranks, trainer.precision), loop.Meter(loss.names, ranks))
        run.average = loop.average(net, trainer.ema)
        identity = entry.flat(cfg.model, "model") | {"optimizer": cfg.optimizer._target_, "training samples": len(train_data)}
        snapshot.resume(run, snapshot.locate(cfg.resume, cfg.run_dir), identity, ranks)
        run.model = make(cfg.strategy)(net, ranks)

        progress, tested, measure = run.progress, {}, cfg.objective.removeprefix("test/")
        cadence, vote = snapshot.Cadence(trainer.save_every), world.Vote(ranks, flags=2)
        panel = board.open_board(ranks, cfg.run_dir, progress.step, OmegaConf.to_yaml(cfg))
        panel.welcome(ranks.size, len(train_data), len(test_data), batch_size)

        def after_step(samples):
            panel.advance(samples)
            if progress.step % trainer.log_every == 0:
                panel.running(progress.step, run.meter.means_since_last(), scheduler.get_last_lr()[0])
            stop, due = vote.cast(signals.stop_asked(), cadence.by_the_clock())
            if stop or due or cadence.after_step(progress.step):
                snapshot.keep(run, identity, cfg.run_dir, trainer.keep, ranks)
            if stop:
                raise signals.Stopped(f"stopped early at step {progress.step}; go on there with hydra.run.dir={cfg.run_dir}")

        finished = trainer.patience == progress.stale or progress.epoch >= trainer.epochs or progress.step == trainer.max_steps
        while not finished:
            panel.start_epoch(progress.epoch + 1, trainer.epochs, len(train_data), progress.samples)
            loop.train(run, train_data, loss, batch_size, trainer.accumulate, trainer.clip_norm, trainer.precision,
                       trainer.max_steps, after_step)  # fmt: skip
            learned = run.meter.means()
            panel.end_training()
            finished = progress.epoch >= trainer.epochs or progress.step == trainer.max_steps
            if finished or progress.epoch % trainer.eval_every == 0:
                strategy.agree_on_buffers(run.judged, ranks)
                tested = loop.evaluate(run, test_data, loss, trainer.eval_batch_size, trainer.precision)
                at_an_epochs_end = progress.samples == 0  # where a run stopped in mid-epoch and resumed judges too
                if at_an_epochs_end and progress.judge(tested[measure], lower_is_better=measure == "loss"):
                    snapshot.keep(run, identity, cfg.run_dir, trainer.keep, ranks, name="best")
                finished = finished or progress.stale == trainer.patience
            panel.end_epoch(progress.step, {"train": learned, "test": tested})
            if finished or cadence.after_epoch(progress.epoch):
                snapshot.keep(run, identity, cfg.run_dir, trainer.keep, ranks)
        vote.close()

        if not tested:  # resumed after its last step
            tested = loop.evaluate(run, test_data, loss, trainer.eval_batch_size, trainer.precision)
        snapshot.export(run, cfg.run_dir, ranks)
        panel.farewell(tested)
        return tested[measure]


def refuse(cfg):
    """Say no before any process is started, to whatever can be known to fail."""
    from lockstep import data, snapshot, world

    preflight.trainer(cfg.trainer)
    for group in ("optimizer", "scheduler", "model"):
        preflight.numbers(group, cfg[group])
    preflight.objective(cfg.objective, make(cfg.dataset.loss).names)
    snapshot.Cadence(cfg.trainer.save_every)
    snapshot.locate(cfg.resume, cfg.run_dir)
    here, starts = rendezvous.read(), cfg.launch.get("nproc_per_node")
    world.choose_backend(cfg.backend.name, starts or here.local_size)
    size = starts * cfg.launch.get("nnodes", 1) if starts else here.size
    data.global_batch(size, cfg.trainer.batch_size, cfg.trainer.batch_size_per_rank, cfg.trainer.accumulate)
    if starts:
        make(cfg.dataset.prepare)


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg):
    cfg = entry.resolved(cfg)
    refuse(cfg)
    return make(cfg.launch)(work, cfg)


if __name__ == "__main__":
    entry.enter(main)
