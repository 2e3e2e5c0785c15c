"""The command of a trained run as the base of mode=evaluate and its like."""

import json
import shlex
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from lockstep.cli import with_trained_run
from lockstep.errors import ConfigError
from support.made_runs import make_run


@pytest.mark.parametrize("mode", ["evaluate", "predict", "export"])
def test_how_a_run_was_spread_and_saved_is_not_taken_over(tmp_path: Path, mode: str) -> None:
    """A sharded format would be refused without the strategy that makes parts."""
    words = ["dataset=digits", "strategy=fsdp", "snapshot.format=sharded", "snapshot.every=50steps"]
    words += ["backend=nccl", "backend.socket_ifname=eth9", "trainer.digest=on", "watch.nan=skip"]
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in words))
    typed = [f"mode={mode}", f"resume={tmp_path}", "mode.snapshot=best"]
    found = with_trained_run(["train.py", *typed])
    assert [word for word in found if not word.startswith("hydra.run.dir=")] == ["train.py", "dataset=digits", *typed]


def test_a_folder_of_configs_can_be_typed_from_anywhere(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    run = json.loads((folder / "run.json").read_text())
    run["flags"] = ["--config-dir=my conf", "--config-name=mine", "hydra.searchpath=[file:///conf]"]
    (folder / "run.json").write_text(json.dumps(run))
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text("[]")
    with pytest.raises(ConfigError) as refused:
        with_trained_run(["train.py", "mode=evaluate", f"resume={folder}"])
    words = [f"--config-dir={tmp_path}/my conf", "--config-name=mine", "hydra.searchpath=[file:///conf]"]
    assert f"; type {shlex.join(words)} with this command, too" in str(refused.value)


def test_what_is_to_be_typed_again_is_quoted_for_the_shell(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- 'model={_target_:own.Net,width:8}'\n")
    with pytest.raises(ConfigError, match=r"type 'model=\{_target_:own.Net,width:8\}'$"):
        with_trained_run(["train.py", "mode=evaluate", f"resume={tmp_path}"])


def test_the_values_of_the_run_count_where_a_file_says_something_else_today(tmp_path: Path) -> None:
    """Plain ones alone, and none that is typed, or that belongs to an option or a class that is typed."""
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- dataset=mine\n- task._target_=my.Task\n- init=old.pt\n")
    dataset = {
        "mean": [0.25],
        "train": {"_target_": "os.system", "noise": 1e-3, "root": "${data_dir}"},
        "names": ["a b"],
    }
    config = {"dataset": dataset, "task": {"_target_": "my.Task", "own": 1}, "model": {"width": 8}, "init": "old.pt"}
    config["trainer"] = {"ema": 0.9, "precision": "fp64", "compile": True}
    (tmp_path / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    def added(*typed: str) -> list[str]:
        words = ["mode=evaluate", f"resume={tmp_path}", "task._target_=my.Task", *typed]
        found = with_trained_run(["train.py", *words])[1 : -len(words)]
        return [word for word in found if word not in ("dataset=mine", "init=old.pt") and "hydra.run.dir" not in word]

    of_data = ["++dataset.mean=[0.25]", "++dataset.train.noise=0.001", '++dataset.names=["a b"]']
    of_net = ["++model.width=8", "++trainer.ema=0.9", '++trainer.precision="fp64"']
    assert added() == ["init=null", "new_layers=[]", "dataset.validation=null", *of_data, *of_net]
    assert added("dataset=other", "trainer.ema=null") == [
        "init=null",
        "new_layers=[]",
        of_data[0],
        of_net[0],
        of_net[2],
    ]
