"""What a second command does in the folder of a sweep: the values it adds, and the jobs of the commands before it."""

from support.commands import PYTHON_TRAIN
from support.sweep_tables import rows_of

SHORT = ["model=linear", "trainer.max_steps=2"]


def test_a_search_that_goes_on_with_one_value_of_a_key_trains_with_it(start):
    drawn = ["sweep.search=random", "sweep.trials=2", "optimizer.lr=interval(0.01,0.1)", "trainer.batch_size=32,16"]
    start(*PYTHON_TRAIN, "-m", *SHORT, *drawn, "hydra.sweep.dir=s").finish()
    run = start(*PYTHON_TRAIN, "-m", "sweep.resume=s", "trainer.batch_size=32", "sweep.trials=4").finish()
    added = rows_of(run.cwd / "s")[2:]
    assert len(added) >= 2
    for row in added:
        assert row["overrides"].endswith(" trainer.batch_size=32")
        assert "batch_size: 32\n" in (run.cwd / "s" / row["folder"] / ".hydra" / "config.yaml").read_text()
