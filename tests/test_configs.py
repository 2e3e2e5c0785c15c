"""Every option of every group composes, and says the names its callee knows."""

import inspect

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import get_object
from omegaconf import OmegaConf

from conftest import ROOT
from lockstep import entry, preflight, world

OPTIONS = [(path.parent.name, path.stem) for path in sorted((ROOT / "conf").glob("[!h]*/*.yaml"))]
WANTED = {"image_folder": ["dataset.classes=2"], "slurm": ["launch.overrides=[]"]}  # what a person or Hydra fills in


def composed(*overrides):
    entry.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=["run_dir=.", *overrides])


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_composes_and_fits_its_callee(group, option):
    cfg = entry.resolved(composed(f"{group}={option}", *WANTED.get(option, [])))

    def check(node, path):
        if not OmegaConf.is_dict(node):
            return
        if "_target_" in node:
            parameters = inspect.signature(get_object(node["_target_"])).parameters
            keys = {key for key in node if not key.startswith("_")}
            assert keys <= parameters.keys() or "kwargs" in parameters or "options" in parameters, f"{path}: {keys - parameters.keys()}"
            if node["_target_"].startswith("lockstep."):  # no number hides in the code
                assert all(p.default is p.empty for p in parameters.values()), path
        for key, value in node.items():
            check(value, f"{path}.{key}")

    check(cfg, "cfg")
    assert {key for key in cfg.backend} == inspect.signature(world.join).parameters.keys()


def test_each_preset_begins_with_its_command():
    for path in (ROOT / "conf" / "experiment").glob("*.yaml"):
        package, command = path.read_text().splitlines()[:2]
        assert package == "# @package _global_"
        assert f"experiment={path.stem}" in command


def test_every_trainer_key_is_checked():
    trainer = composed().trainer
    preflight.trainer(trainer)
    assert trainer.keys() == preflight.TRAINER.keys()


def test_sync_bn_is_quoted():
    assert composed("sync_bn=on").sync_bn._target_ == "lockstep.sync_bn.on"
