"""docs/start.md: its files, copied to a folder outside the repository, and all its commands, in its order."""

import csv
import re

import numpy as np
import torch
from PIL import Image

from support.commands import ROOT
from support.pages import COMMANDS, copy_examples, environment

PAGE = (ROOT / "docs" / "start.md").read_text()


def test_a_project_from_data_to_export(tmp_path, start):
    copy_examples(PAGE, tmp_path)
    words = ("bash", "-c", "set -e\n" + "".join(COMMANDS.findall(PAGE)))
    output = start(*words, cwd=tmp_path / "lockstep", **environment(tmp_path)).finish(limit=220).output
    assert "162 training, 18 validation and 60 test samples" in output
    assert float(re.findall(r"test: +loss .*f1 (\d\.\d+)", output)[0]) > 0.8
    assert re.search(r"evaluated: test loss \d\.\d+, accuracy \d\.\d+, f1 \d\.\d+, over 60 samples", output)
    program = torch.export.load(tmp_path / "lockstep" / "outputs" / "shapes.pt2").module()
    photo = Image.open(tmp_path / "shapes" / "photos" / "000.png")
    pixels = torch.tensor(np.asarray(photo)).permute(2, 0, 1)[None]
    assert program(pixels).argmax(1).item() == 2  # of cross, disc and square
    for name, first, truth in (("shapes/predictions.csv", "photos/180.png", "square"), ("new.csv", "000.png", "")):
        with open(tmp_path / "lockstep" / "outputs" / name) as file:
            row = next(csv.DictReader(file))
        assert (row["file"], row["truth"]) == (first, truth)
    assert re.search(r"best: +optimizer.lr=0", output)
    assert re.search(r"choosing: +val/f1 ", output)
