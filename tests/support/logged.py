"""What a run tells its loggers."""

from lockstep.loggers.base import EpochSummary, RunInfo


def run_info(folder, start_step=0, world_size=1, batch_size=64):
    return RunInfo(
        run_dir=folder,
        config_yaml="seed: 0\n",
        hyperparameters={"optimizer.lr": 0.1, "model": "mlp", "trainer.ema": True},
        metrics=["loss", "accuracy"],
        world_size=world_size,
        data_parallel_size=world_size,
        train_samples=1293,
        test_samples=360,
        batch_size=batch_size,
        epochs=2,
        start_step=start_step,
        objective="val/accuracy",
        val_samples=144,
        facts={"overrides": [], "config": {}, "tags": [], "notes": None, "start": {}, "data": {}},
        evaluate=f"python src/train.py mode=evaluate resume={folder}",
    )


def epoch(number):
    metrics = {"train": {"loss": 1 / number, "accuracy": 0.5}, "val": {"loss": 2 / number, "accuracy": 0.25}}
    return EpochSummary(number, 2, 2 * number, metrics, 1234.5)
