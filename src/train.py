"""The door of Lockstep, and one rank's whole life.

python src/train.py
torchrun --standalone --nproc_per_node=2 src/train.py backend=gloo trainer.epochs=10
python src/train.py -m launch=torchrun optimizer.lr=0.1,0.01
"""

import hydra
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lockstep import entry, launch, preflight, rendezvous, signals
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
    from lockstep import board, lean, lock, loop, snapshot, strategy, world

    signals.listen()
    lean.put_off_dynamo()
    with board.logs(cfg.run_dir, rendezvous.read().rank), world.join(**cfg.backend) as ranks, lock.hold(cfg.run_dir, ranks):
        ranks.same_on_all(entry.flat({key: value for key, value in cfg.items() if key != "launch"}), hint="start every rank with the same command")
        loop.settle(cfg.seed, cfg.trainer.deterministic)
        with ranks.leader_first():
            make(cfg.dataset.prepare)
        net = make(cfg.sync_bn)(loop.place(make(cfg.model), ranks, cfg.trainer.precision, cfg.trainer.channels_last, cfg.trainer.compile), ranks)
        like = next(net.parameters()).detach()  # as it lies before a strategy may take it apart
        model = make(cfg.gradient_sync)(make(cfg.strategy)(net, ranks), ranks)
        train_data, test_data = feed(cfg, strategy.reader(model, ranks), like)
        run = assemble(cfg, ranks, model, len(train_data))

        with snapshot.Keeper(run, ranks, cfg.run_dir, identity(cfg, train_data), len(train_data), cfg.trainer.save_every, cfg.trainer.keep) as keeper:
            keeper.resume(cfg.resume)

            panel = board.open_board(ranks, cfg.run_dir, run, OmegaConf.to_yaml(cfg), cfg.trainer.log_every)
            keeper.before_save = panel.flush  # a killed run's curves reach as far as its snapshots
            panel.welcome(ranks.size, train_data.world.size, len(train_data), len(test_data))
            train, tested = make(cfg.loop), {}
            if preflight.on(cfg.trainer.profile):
                from lockstep import timeline

                train = timeline.watched(train, ranks, panel.post, cfg.run_dir, **cfg.timeline)
            while not run.finished:
                panel.start_epoch(len(train_data))
                figures = train(run, train_data, after_step=[panel.after_step, keeper.after_step])
                panel.end_training(run.meter.means(), figures)
                if run.evaluation_due:
                    tested = loop.evaluate(run, test_data)
                    panel.end_evaluation(tested)
                    if run.judge(tested[cfg.objective.removeprefix("test/")], lower_is_better=cfg.objective == "test/loss"):
                        keeper.save("best")
                panel.end_epoch()
                keeper.after_epoch()

            tested = tested or loop.evaluate(run, test_data)  # a finished run, started again
            keeper.export()
            panel.farewell(tested)
            return tested[cfg.objective.removeprefix("test/")]


def feed(cfg, reader, like):
    """This reader's training and test data, delivered in the type and layout of the parameter `like`."""
    from lockstep import data

    how = {"world": reader, "seed": cfg.seed, "mean": cfg.dataset.mean, "std": cfg.dataset.std, "like": like, "workers": cfg.dataset.workers}
    return data.Loader(make(cfg.dataset.train), augment=data.Augment(**cfg.dataset.augment), **how), data.Loader(make(cfg.dataset.test), **how)


def assemble(cfg, ranks, model, samples):
    """The run that trains `model` on `samples` samples: its recipe, and everything that changes as it goes."""
    from lockstep import average, data, loop, meter, strategy

    trainer, loss = cfg.trainer, make(cfg.dataset.loss)
    same = ("epochs", "max_steps", "clip_norm", "precision", "eval_batch_size", "eval_every", "patience")
    batch_size = data.global_batch(strategy.reader(model, ranks).size, trainer.batch_size, trainer.batch_size_per_rank, trainer.accumulate)
    cut = data.virtual_ranks(trainer.shards) if trainer.shards else data.micro_batches(trainer.accumulate)
    recipe = loop.Recipe(loss=loss, batch_size=batch_size, cut=cut, **{key: trainer[key] for key in same})
    optimizer = make(cfg.optimizer)(model.parameters())
    scheduler = make(cfg.scheduler)(optimizer, *recipe.steps(samples))
    scaler, ema = loop.scaler(ranks, trainer.precision), trainer.ema and average.Average(strategy.bare(model), trainer.ema)
    return loop.Run(recipe, model, optimizer, scheduler, scaler, meter.Meter(loss.names, ranks), ema)


def identity(cfg, train_data):
    """What a snapshot must share with a run that resumes from it."""
    return entry.flat(cfg.model, "model") | {"optimizer": cfg.optimizer._target_, "training samples": len(train_data)}


def refuse(cfg):
    """Say no before any process is started, to whatever can be known to fail."""
    from lockstep import data, snapshot, world

    preflight.trainer(cfg.trainer)
    preflight.timeline(cfg.timeline)
    for group in ("optimizer", "scheduler", "model"):
        preflight.numbers(group, cfg[group])
    preflight.objective(cfg.objective, make(cfg.dataset.loss).names)
    snapshot.Cadence(cfg.trainer.save_every)
    snapshot.locate(cfg.resume, cfg.run_dir)
    here, starts, submits = rendezvous.read(), cfg.launch.get("nproc_per_node"), cfg.launch.get("ntasks_per_node")
    if not submits:  # the nodes of a job may have the GPUs that this machine lacks
        world.choose_backend(cfg.backend.name, starts or here.local_size)
    preflight.gradient_sync(cfg.gradient_sync._target_, strategy=cfg.strategy._target_, precision=cfg.trainer.precision)
    preflight.shards(cfg.trainer.shards, strategy=cfg.strategy._target_, accumulate=cfg.trainer.accumulate, sync_bn=cfg.sync_bn._target_)
    size = submits * cfg.launch.nodes if submits else starts * cfg.launch.get("nnodes", 1) if starts else here.size
    preflight.loop(cfg.loop._target_, strategy=cfg.strategy._target_)
    preflight.strategy(cfg.strategy._target_, cfg.strategy, size, cfg.trainer, cfg.sync_bn._target_, cfg.optimizer)
    data.global_batch(size, cfg.trainer.batch_size, cfg.trainer.batch_size_per_rank, cfg.trainer.accumulate)
    if starts:
        make(cfg.dataset.prepare)


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg):
    cfg = entry.resolved(cfg)
    launch.import_once(cfg.launch.get("start_method"))
    refuse(cfg)
    entry.collect_garbage()
    return make(cfg.launch)(work, cfg)


if __name__ == "__main__":
    entry.enter(main)
