"""Which classes and functions a config may name: what a stranger's config cannot run, and what stays possible."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from lockstep.config.targets import check_targets, is_open, locate
from omegaconf import OmegaConf

from lockstep import cli
from lockstep.compat import hydra_version_base
from lockstep.errors import ConfigError
from support.commands import ROOT, Command

pytestmark = pytest.mark.whole

Train = Callable[..., Command]
OWN = """
_target_: own_nets.Net
activation:
  _target_: own_nets.${act}
"""


def refusal(*typed: str, config_dir: Path) -> str | None:
    """What `check_targets` says of `train.py <typed> --config-dir=<config_dir>`. None if it allows every name."""
    cli.register_resolvers()
    GlobalHydra.instance().clear()
    words = ["run_dir=.", *typed, f"hydra.searchpath=[file://{config_dir}]"]
    with initialize_config_dir(str(ROOT / "conf"), **hydra_version_base()):
        cfg = compose("config", overrides=words, return_hydra_config=True)
    try:
        check_targets(OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"]), cfg.hydra)
    except ConfigError as error:
        return str(error)
    return None


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A config folder of the user's own, with a model in it."""
    folder = tmp_path / "conf"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "own.yaml").write_text(OWN)
    return folder


def test_every_option_of_this_project_is_open_to_all() -> None:
    named = [
        line.split("_target_:")[1].split()[0]
        for path in (ROOT / "conf").rglob("*.yaml")
        if path.parent.parent.name != "hydra"  # Hydra makes its plugins itself
        for line in path.read_text().splitlines()
        if "_target_:" in line
    ]
    assert len(named) > 40
    assert [name for name in named if not is_open(name)] == []


def test_what_was_typed_or_stands_in_an_own_config_folder_is_allowed(own: Path, tmp_path: Path) -> None:
    assert refusal(config_dir=own) is None
    assert refusal("model=own", "+act=gelu", config_dir=own) is None
    assert refusal("model._target_=anything.at_all", config_dir=tmp_path) is None
    assert refusal("+logger.x={_target_:os.getpid}", config_dir=tmp_path) is None


@pytest.mark.parametrize("name", ["os.system", "subprocess.run", "builtins.eval", "pickle.loads", "posix.system"])
def test_an_own_config_folder_may_not_name_the_standard_library(own: Path, name: str) -> None:
    (own / "model" / "copied.yaml").write_text(f"_target_: {name}\n")
    said = refusal("model=copied", config_dir=own)
    assert said is not None
    assert said.startswith(f"model._target_={name} may run anything")
    assert said.endswith(f"if you trust it, type model._target_={name}")


@pytest.mark.parametrize("name", ["own_nets.Net", "torch.hub.load", "torch.load", "lockstep.config.targets.locate"])
@pytest.mark.parametrize("folder", [".hydra", "renamed"])
def test_the_record_of_a_run_names_nothing_beyond_the_parts_of_a_config(tmp_path: Path, name: str, folder: str) -> None:
    record = tmp_path / folder
    (record / "model").mkdir(parents=True)
    (record / "model" / "theirs.yaml").write_text(f"_target_: {name}\n")
    for file in ("hydra.yaml", "overrides.yaml"):
        (record / file).write_text("{}")
    assert refusal("model=theirs", config_dir=record) is not None
    assert refusal("model=theirs", f"model._target_={name}", config_dir=record) is None
    (record / "model" / "theirs.yaml").write_text("_target_: torch.nn.Flatten\n")
    assert refusal("model=theirs", config_dir=record) is None


@pytest.mark.parametrize(
    "name",
    [
        "torch.os.system",
        "torch.nn.functional.math.sin",
        "torch.nn.modules.module.torch.load",
        "torch.utils.data.dataloader.torch.hub.load",
        "torchvision.models.vgg.partial",
        "torchvision.datasets.mnist.os.remove",
        "torchvision.transforms.functional.sys.modules.clear",
        "hydra.utils.os.system",
    ],
)
def test_a_name_does_not_lead_out_of_its_package(name: str) -> None:
    with pytest.raises(ConfigError, match="is not allowed: .* belongs to .*; type model._target_="):
        locate("model._target_", name, "model")


@pytest.mark.parametrize(
    "name", ["torch.nn.functional.gelu", "torch.nn.functional.conv2d", "torchvision.models.get_model", "torch.nn.GELU"]
)
def test_public_names_of_an_open_package_are_found(name: str) -> None:
    assert is_open(name)
    assert callable(locate("model._target_", name, "model"))


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The record of a finished run of a stranger's."""
    folder = tmp_path / "theirs" / ".hydra"
    folder.mkdir(parents=True)
    GlobalHydra.instance().clear()
    cli.register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), **hydra_version_base()):
        cfg = compose("config", overrides=["run_dir='${hydra:runtime.output_dir}'", "model=linear", "trainer.epochs=1"])
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    (folder / "hydra.yaml").write_text("hydra: {}\n")
    (folder / "overrides.yaml").write_text("[]\n")
    return folder


def change(record: Path, **changes: object) -> None:
    config = yaml.safe_load((record / "config.yaml").read_text())
    (record / "config.yaml").write_text(yaml.safe_dump(config | changes))


def test_a_run_is_repeated_from_its_record(record: Path, train: Train) -> None:
    run = train(f"--config-path={record}", "hydra.run.dir=run")
    assert "finished: test loss" in run.output


def test_a_strangers_record_cannot_run_a_command(record: Path, train: Train) -> None:
    touch = {"_target_": "os.system", "command": "touch pwned"}
    change(record, model=touch)
    run = train(f"--config-path={record}", "hydra.run.dir=run", code=2)
    assert "model._target_=os.system may run anything" in run.sentence
    change(record, hydra={"callbacks": {"theirs": touch}})
    run = train(f"--config-path={record}", "hydra.run.dir=run", code=2)
    assert "config.yaml is in the record of a run and contains hydra, which can run commands" in run.sentence
    run = train(f"--config-dir={record.parent}", "--config-name", ".hydra/hydra", code=2)
    assert "sets up Hydra itself; type --config-name=config" in run.sentence
    assert not (run.cwd / "pwned").exists()
