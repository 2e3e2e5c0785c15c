"""What a run leaves in its folder, and what must be true of it."""

import re

from lockstep.snapshots.files import STATE, list_snapshots, load_state, load_tensors
from lockstep.snapshots.state import SECTIONS, as_held
from support.event_files import scalars

# A training slow enough to be interrupted, with a snapshot every few steps. Its bits do not depend on the interruption.
SLOW = [
    "model=mlp",
    "model.width=1024",
    "trainer.epochs=12",
    "trainer.batch_size=32",
    "snapshot.every=5steps",
    "trainer.deterministic=true",
]


def read_log(folder):
    return (folder / "train.log").read_text()


def has_logged(folder, words):
    return (folder / "train.log").exists() and words in read_log(folder)


def newest_snapshot(folder):
    return contents(list_snapshots(folder / "snapshots")[0])


def best_snapshot(folder):
    """That of the best evaluation."""
    return contents(list_snapshots(folder / "snapshots", "best")[0])


def contents(path):
    """What a snapshot holds, with all tensors, those of its shards too, whole."""
    saved = load_state(path)
    return saved | {section: as_held(saved, section, path, saved[section], {}) for section in SECTIONS}


def position(folder):
    """(step, world size) of the newest snapshot of a run that goes on; (0, 0) before the first."""
    for path in list_snapshots(folder / "snapshots")[:2]:
        try:
            saved = load_tensors(path / STATE)
            return saved["progress"]["step"], saved["world_size"]
        except FileNotFoundError:  # the run has just deleted it
            pass
    return 0, 0


def count_resumptions(folder):
    return read_log(folder).count("resumed from")


def stopped_at(folder, log="train.log"):
    match = re.search(r"stopped early at step (\d+)", (folder / log).read_text())
    assert match, f"{folder}/{log} does not say where the run stopped"
    return int(match[1])


def assert_one_curve(folder):
    """Every curve goes forward, and the learning rate has a point at every tenth step."""
    curves = {tag: [step for step, _ in curve] for tag, curve in scalars(folder).items()}
    for tag, steps in curves.items():
        assert steps == sorted(set(steps)), tag
    assert curves["train/lr"] == list(range(10, curves["train/lr"][-1] + 1, 10))
