"""Shards with samples that say which they are."""

import io
import json
import tarfile

import numpy as np
from PIL import Image

PIXELS = 8  # of a side of a picture


def write_tars(folder, name, sizes, first=0):
    """Tar files of so many samples each. Sample n has its number as n.txt, n % 2 as n.cls, and n.npy; a picture as
    n.png, which is light where the class is 1; and n.json with all of it."""
    paths = []
    for shard, count in enumerate(sizes):
        paths.append(folder / f"{name}-{shard:03}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for number in range(first, first + count):
                picture, array = io.BytesIO(), io.BytesIO()
                Image.new("RGB", (PIXELS, PIXELS), (60 + 120 * (number % 2),) * 3).save(picture, "PNG")
                np.save(array, np.full(4, float(number)))
                label, text = str(number % 2).encode(), json.dumps({"number": number, "label": number % 2}).encode()
                fields = {"png": picture.getvalue(), "npy": array.getvalue(), "cls": label, "txt": b"%d" % number}
                fields["json"] = text
                for extension, stored in fields.items():
                    info = tarfile.TarInfo(f"some/folder/{number:06}.{extension}")
                    info.size = len(stored)
                    tar.addfile(info, io.BytesIO(stored))
        first += count
    return paths
