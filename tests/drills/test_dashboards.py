"""TensorBoard's pages of real runs, as a browser shows them. `make screenshots` writes images of them to docs/."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.browser import Browser, find_chromium
from support.commands import PYTHON_TRAIN, Command, wait_for

pytestmark = pytest.mark.drill

TWO_RANKS = [*PYTHON_TRAIN, "launch=fork", "launch.nproc_per_node=2", "logging.every=5"]
RUNS = {
    "model=convnet": ["model=convnet", "optimizer.lr=0.1", "trainer.max_grad_norm=10"],
    "model=mlp,optimizer=adamw": ["model=mlp", "optimizer=adamw", "optimizer.lr=0.005", "trainer.max_grad_norm=10"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two runs of two ranks. The first one goes on for two epochs after it was finished."""
    parent = tmp_path_factory.mktemp("dashboards") / "outputs"
    parent.mkdir()
    for name, epochs in [*((name, 6) for name in RUNS), ("model=convnet", 8)]:
        options = [*RUNS[name], f"trainer.epochs={epochs}", f"hydra.run.dir='{parent / name}'"]
        Command([*TWO_RANKS, *options], cwd=parent).finish()
    return parent


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Of a TensorBoard that has read all runs."""
    log = folder.parent / "tensorboard.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "tensorboard.main", f"--logdir={folder.name}", "--port=0", "--host=127.0.0.1"]
        server = subprocess.Popen(command, cwd=folder.parent, stdout=output, stderr=output)
    try:
        wait_for(lambda: "http://" in log.read_text(), "address of TensorBoard", 120)
        (found,) = re.findall(r"http://\S+?(?=/ )", log.read_text())

        def runs_with(plugin: str) -> set[str]:
            with urllib.request.urlopen(f"{found}/data/plugin/{plugin}/tags") as answer:
                return {*json.load(answer)}

        wait_for(lambda: runs_with("scalars") == runs_with("images") == {*RUNS}, "runs in TensorBoard", 120)
        yield found
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.skip("needs chromium; type apt-get install chromium")
    browser = Browser(path, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def screenshot(browser: Browser, name: str, folder: Path, height: int = 1000) -> None:
    """Without the menu of the tabs that have nothing to show."""
    browser.evaluate("deep('plugin-selector mat-form-field').forEach(menu => menu.style.visibility = 'hidden')")
    browser.screenshot(Path(os.environ.get("LOCKSTEP_SCREENSHOTS", folder)) / name, height)


def test_the_hparams_table_has_a_row_for_each_run(browser: Browser, address: str, folder: Path) -> None:
    browser.open(f"{address}/#hparams")
    shown = browser.wait_for("Trial ID", *RUNS)
    table = shown.partition("Trial ID")[2].split("\n")
    headings = table[: table.index("model=convnet")]
    assert {"model", "optimizer", "optimizer.lr", "best/accuracy", "test/accuracy", "test/loss"} <= set(headings)
    first = table[table.index("model=convnet") :]
    assert "0.10000" in first[: first.index("model=mlp,optimizer=adamw")]
    assert "0.0050000" in first[first.index("model=mlp,optimizer=adamw") :]
    screenshot(browser, "dashboard_hparams.png", folder, height=420)


def test_no_chart_of_the_layout_is_empty(browser: Browser, address: str, folder: Path) -> None:
    browser.open(f"{address}/#custom_scalars")
    browser.wait_for("results", "loss", "accuracy", "best so far", "Matches (")
    wait_for(lambda: "Matches (0)" not in browser.text(), "points in every chart")
    wait_for(lambda: min(curves(browser)) > 0, "a curve in every chart")
    screenshot(browser, "dashboard.png", folder)


def curves(browser: Browser) -> list[int]:
    """How many each chart of the custom scalars has drawn."""
    drawn = "deep('path.line', chart.shadowRoot || chart).filter(path => path.getAttribute('d').length > 20)"
    found: list[int] = browser.evaluate(f"deep('vz-line-chart2').map(chart => {drawn}.length)")
    return found or [0]


def test_the_images_of_both_runs_are_loaded(browser: Browser, address: str, folder: Path) -> None:
    browser.open(f"{address}/#images")
    figures = ["test/worst_first", "test/confusion_matrix"]
    browser.wait_for(*figures, *RUNS)
    # A pending image of the validation set gives way to that of the test at the end of a short run.
    wait_for(lambda: len(widths(browser)) >= 4 and min(widths(browser)) > 300, "four images")
    screenshot(browser, "dashboard_images.png", folder)


def widths(browser: Browser) -> list[int]:
    """Of the images that have been loaded."""
    found: list[int] = browser.evaluate("deep('#main-image-container img').map(image => image.naturalWidth)")
    return found


def test_the_tabs_are_those_of_the_data(browser: Browser, address: str) -> None:
    browser.open(f"{address}/#timeseries")
    browser.wait_for("best", *RUNS)
    tabs = "plugin-selector .mat-mdc-tab:not(.mat-mdc-tab-disabled)"
    shown = browser.evaluate(f"deep('{tabs}').map(tab => tab.innerText.trim().toLowerCase())")
    assert set(shown) == {"time series", "scalars", "custom scalars", "images", "hparams"}
