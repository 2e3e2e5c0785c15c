"""Hydra's commands compose their config once, with the result of composing it for the mode that they have."""

from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lockstep.cli_compose import compose_once

MAIN = "defaults: [_self_]\nlr: 1\nhydra: {mode: %s, run: {dir: .}, sweep: {dir: .}}\n"


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The overrides of each config that Hydra composes from its files."""
    words: list[list[str]] = []
    load = ConfigLoaderImpl._load_configuration_impl

    def note(loader: ConfigLoaderImpl, **options: Any) -> DictConfig:
        words.append(list(options["overrides"]))
        return load(loader, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "_load_configuration_impl", note)
    monkeypatch.setattr("hydra._internal.hydra.ConfigLoaderImpl", ConfigLoaderImpl)  # put back after the test
    return words


def open_hydra(folder: Path, mode: str) -> Hydra:
    (folder / "main.yaml").write_text(MAIN % mode)
    GlobalHydra.instance().clear()
    return Hydra.create_main_hydra2("task", create_config_search_path(str(folder)))


@pytest.mark.parametrize(("is_sweep", "word"), [(False, "lr=2"), (True, "lr=2,3")])
def test_a_command_composes_its_config_once(
    is_sweep: bool, word: str, composed: list[list[str]], tmp_path: Path
) -> None:
    mode, words = RunMode.MULTIRUN if is_sweep else RunMode.RUN, [word, "hydra.job.name=a"]
    compose_once(is_sweep)
    hydra = open_hydra(tmp_path, "null")
    assert hydra.get_mode("main", words) is None
    words.append(f"hydra.mode={mode.name}")  # as Hydra does
    config = hydra.compose_config("main", words, mode)
    assert len(composed) == 1
    again = hydra.compose_config("main", words, mode)  # from the files
    assert len(composed) == 2
    assert OmegaConf.to_yaml(config) == OmegaConf.to_yaml(again)


def test_the_mode_of_a_config_file_counts(composed: list[list[str]], tmp_path: Path) -> None:
    compose_once(is_sweep=False)
    assert open_hydra(tmp_path, "MULTIRUN").get_mode("main", ["lr=2,3"]) == RunMode.MULTIRUN
    hydra = open_hydra(tmp_path, "null")
    assert hydra.get_mode("main", ["lr=2,3"]) is None
    with pytest.raises(ConfigCompositionException, match="-m|multirun"):
        hydra.compose_config("main", ["lr=2,3", "hydra.mode=RUN"], RunMode.RUN)
