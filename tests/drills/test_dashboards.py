"""TensorBoard's pages of real runs, as a browser shows them. `make screenshots` writes images of them to docs/."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from support.commands import PYTHON_TRAIN, wait_for
from support.event_files import Backend, images, scalars

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
PAGES = {"dashboard_hparams.png": ("hparams", 420), "dashboard.png": ("custom_scalars", 1000)}
PAGES |= {"dashboard_images.png": ("images", 1000)}
RUNS = {"model=convnet": ["optimizer.lr=0.1"], "model=mlp,optimizer=adamw": ["optimizer=adamw", "optimizer.lr=0.005"]}


@pytest.fixture
def address(tmp_path):
    """Of a TensorBoard that has read outputs/."""
    log = tmp_path / "tensorboard.log"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir=outputs", "--port=0", "--host=127.0.0.1"]
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output)
    wait_for(lambda: "http://" in log.read_text(), "address of TensorBoard", 120)
    yield re.findall(r"http://\S+?(?=/ )", log.read_text())[0]
    server.terminate()
    server.wait()


@pytest.mark.drill
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; type apt-get install chromium")
def test_two_runs_of_two_ranks_of_which_one_goes_on_are_shown(start, tmp_path, request):
    for name, epochs in [*((name, 6) for name in RUNS), ("model=convnet", 8)]:
        words = [name.partition(",")[0], *RUNS[name], "trainer.max_grad_norm=10", "logging.every=5", "launch=fork"]
        start(*PYTHON_TRAIN, *words, f"trainer.epochs={epochs}", f"hydra.run.dir='outputs/{name}'").finish()
    backend = Backend(tmp_path / "outputs")
    columns, rows = {column["name"] for column in backend.columns()}, backend.rows()
    assert {"model", "optimizer", "optimizer.lr"} <= columns
    assert [rows[name].hyperparameters["optimizer.lr"] for name in RUNS] == [0.1, 0.005]
    for name, row in rows.items():
        assert {"best/accuracy", "test/accuracy", "test/loss"} <= row.metrics.keys()
        curves = scalars(tmp_path / "outputs" / name)
        for chart in backend.layout()[0]["chart"]:  # none is empty
            assert [tag for tag in curves for shown in chart["multiline"]["tag"] if re.search(shown, tag)], chart
        assert images(tmp_path / "outputs" / name).keys() >= {"test/worst_first", "test/confusion_matrix"}
    address = request.getfixturevalue("address")
    for file, (tab, height) in PAGES.items():
        path = Path(os.environ.get("LOCKSTEP_SCREENSHOTS", tmp_path)).resolve() / file
        words = [f"--screenshot={path}", f"--window-size=1700,{height}", "--virtual-time-budget=60000"]
        subprocess.run([CHROMIUM, *OPTIONS, *words, f"{address}/#{tab}"], check=True, timeout=300, cwd=tmp_path)
        assert len(Image.open(path).convert("RGB").getcolors(1 << 24)) > 200, file  # of curves, pictures, letters
