"""TensorBoard's pages of real runs, as a browser shows them. `make screenshots` writes images of them to docs/."""

import json
import os
import re
import subprocess
import sys
import urllib.request
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
def folder(tmp_path_factory):
    """The folder of two runs of two ranks. The first one goes on for two epochs after it was finished."""
    parent = tmp_path_factory.mktemp("dashboards") / "outputs"
    parent.mkdir()
    for name, epochs in [*((name, 6) for name in RUNS), ("model=convnet", 8)]:
        options = [*RUNS[name], f"trainer.epochs={epochs}", f"hydra.run.dir='{parent / name}'"]
        Command([*TWO_RANKS, *options], cwd=parent).finish()
    return parent


@pytest.fixture(scope="module")
def address(folder):
    """Of a TensorBoard that has read all runs."""
    log = folder.parent / "tensorboard.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "tensorboard.main", f"--logdir={folder.name}", "--port=0", "--host=127.0.0.1"]
        server = subprocess.Popen(command, cwd=folder.parent, stdout=output, stderr=output)
    try:
        wait_for(lambda: "http://" in log.read_text(), "address of TensorBoard", 120)
        (found,) = re.findall(r"http://\S+?(?=/ )", log.read_text())

        def runs_with(plugin):
            with urllib.request.urlopen(f"{found}/data/plugin/{plugin}/tags") as answer:
                return {*json.load(answer)}

        wait_for(lambda: runs_with("scalars") == runs_with("images") == {*RUNS}, "runs in TensorBoard", 120)
        yield found
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    path = find_chromium()
    if path is None:
        pytest.skip("needs chromium; type apt-get install chromium")
    browser = Browser(path, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def screenshot(browser, name, folder, height=1000):
    """Without the menu of the tabs that have nothing to show."""
    browser.evaluate("deep('plugin-selector mat-form-field').forEach(menu => menu.style.visibility = 'hidden')")
    browser.screenshot(Path(os.environ.get("LOCKSTEP_SCREENSHOTS", folder)) / name, height)


def test_the_hparams_table_has_a_row_for_each_run(browser, address, folder):
    browser.open(f"{address}/#hparams")
    table = browser.wait_for("Trial ID", *RUNS).partition("Trial ID")[2].split("\n")
    first, second = (table.index(name) for name in RUNS)
    assert {"model", "optimizer", "optimizer.lr", "best/accuracy", "test/accuracy", "test/loss"} <= {*table[:first]}
    assert "0.10000" in table[first:second]
    assert "0.0050000" in table[second:]
    screenshot(browser, "dashboard_hparams.png", folder, height=420)


def test_no_chart_of_the_layout_is_empty(browser, address, folder):
    drawn = "deep('path.line', chart.shadowRoot || chart).filter(path => path.getAttribute('d').length > 20)"
    curves = f"deep('vz-line-chart2').map(chart => {drawn}.length)"
    browser.open(f"{address}/#custom_scalars")
    browser.wait_for("results", "loss", "accuracy", "best so far", "Matches (")
    wait_for(lambda: "Matches (0)" not in browser.text(), "points in every chart")
    wait_for(lambda: min(browser.evaluate(curves) or [0]) > 0, "a curve in every chart")
    screenshot(browser, "dashboard.png", folder)


def test_the_images_of_both_runs_are_loaded(browser, address, folder):
    widths = "deep('#main-image-container img').map(image => image.naturalWidth).filter(width => width > 300).length"
    browser.open(f"{address}/#images")
    browser.wait_for("test/worst_first", "test/confusion_matrix", *RUNS)
    # A pending image of the validation set gives way to that of the test at the end of a short run.
    wait_for(lambda: browser.evaluate(widths) >= 4, "four images")
    screenshot(browser, "dashboard_images.png", folder)


def test_the_tabs_are_those_of_the_data(browser, address):
    browser.open(f"{address}/#timeseries")
    browser.wait_for("best", *RUNS)
    tabs = "plugin-selector .mat-mdc-tab:not(.mat-mdc-tab-disabled)"
    shown = browser.evaluate(f"deep('{tabs}').map(tab => tab.innerText.trim().toLowerCase())")
    assert set(shown) == {"time series", "scalars", "custom scalars", "images", "hparams"}
