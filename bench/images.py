"""Folders of JPEGs: Lockstep, with and without decoded pixels on disk, in turns with torchvision's references loop.

python bench/images.py [--quick] [--rounds=3]

Both train the same small net on the same made images with two workers. The first epoch of a run that decodes its images
once includes that; the next run of the same data would not need it.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
from PIL import Image

CLASSES = 8
COUNTS = {32: 4096, 224: 512}  # training images by size; an eighth as many are for tests
EPOCHS, BATCH = 3, 64
Laps = list[float]
"""Seconds of training of each epoch."""


def make_images(root: Path, size: int, count: int) -> None:
    """JPEGs with as much detail as photos have: smooth colours and some noise."""
    drawn = np.random.default_rng(size)
    for split, images in (("train", count), ("test", count // 8)):
        for number in range(images):
            small = drawn.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
            smooth = np.asarray(Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC), dtype=np.int64)
            noisy = (smooth + drawn.integers(-12, 13, smooth.shape)).clip(0, 255).astype(np.uint8)
            path = root / split / f"class{number % CLASSES}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noisy).save(path, quality=90)


def references(root: Path, size: int) -> Laps:
    script = [str(harness.CONTENDERS / "references_images.py"), f"--data={root}", f"--size={size}"]
    return run([*script, f"--epochs={EPOCHS}", f"--batch={BATCH}"])


def lockstep(root: Path, size: int, cache: bool) -> Laps:
    """The time that decoding takes, of the tests' images, too, counts for the first epoch."""
    from lockstep.data.images import ImageFolders

    with tempfile.TemporaryDirectory() as decoded:
        same = ["dataset=image_folder", f"dataset.root={root}", f"dataset.size={size}", f"dataset.cache={cache}"]
        same += [f"trainer.epochs={EPOCHS}", f"trainer.batch_size={BATCH}", f"dataset.cache_dir={decoded}"]
        net = ["model._target_=workload.small_image_net", "optimizer.lr=0.1", "hydra.run.dir=run"]
        began = time.monotonic()
        ImageFolders(root=str(root), size=size, cache=cache, cache_dir=decoded).prepare()
        preparing = time.monotonic() - began
        first, *later = run([harness.TRAIN, *same, *net, f"loader.num_workers={0 if cache else 2}", *harness.MEASURED])
        return [first + preparing, *later]


def run(command: list[str]) -> Laps:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if code := harness.run_on_terminal([sys.executable, *command], folder):
            sys.exit(f"{command} ended with {code}:\n{(folder / 'console.log').read_text()}")
        return [lap["seconds"] for lap in harness.records(folder)[0]["training"]]


def ratios(found: dict[str, list[Laps]], name: str) -> list[str]:
    """How many times as many samples a second `name` trains, in the first epoch and in the median later one."""
    pairs = list(zip(found["references"], found[name], strict=True))
    first = [theirs[0] / ours[0] for theirs, ours in pairs]
    later = [statistics.median(theirs[1:]) / statistics.median(ours[1:]) for theirs, ours in pairs]
    return [harness.spread(first), harness.spread(later)]


def main() -> None:
    args = harness.parse(harness.parser(__doc__ or "", "images", rounds=3))
    rows = []
    for size, count in COUNTS.items():
        count //= 10 if args.quick else 1
        root = Path(tempfile.mkdtemp(prefix="lockstep-images-"))
        try:
            make_images(root, size, count)
            ways: dict[Any, Callable[[], Any]] = {
                "references": partial(references, root, size),
                "decoded once": partial(lockstep, root, size, True),
                "decoded each time": partial(lockstep, root, size, False),
            }
            found = harness.interleave(ways, args.rounds)
        finally:
            shutil.rmtree(root)
        rows += [[f"{size}x{size}, {count}", name, *ratios(found, name)] for name in list(ways)[1:]]
    head = ["images", "Lockstep", "first epoch, samples/s against references", "later epochs"]
    harness.save(args.out, "images", f"{harness.processor()}\n\n{harness.table(head, rows)}")


if __name__ == "__main__":
    main()
