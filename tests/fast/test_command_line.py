"""The command line without a training: questions, the record of a config, and the words of a trained run."""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lockstep import cli
from lockstep.config.check import check
from lockstep.config.record import config_flags, record_config
from lockstep.config.schema import CONF
from lockstep.distributed.run_folder import require_same_run
from lockstep.errors import ConfigError
from support.commands import TRAIN, Command
from support.configs import as_composed


@pytest.mark.new_process
@pytest.mark.parametrize("question", [["--help"], ["--cfg", "job"]], ids=" ".join)
def test_a_question_is_answered_without_torch_and_pydantic(
    start: Callable[..., Command], tmp_path: Path, question: list[str]
) -> None:
    answer = start(sys.executable, "-X", "importtime", TRAIN, *question).finish().output
    assert not re.search(r"\|\s+(torch|pydantic)$", answer, re.MULTILINE)
    wanted = (CONF / "help.txt").read_text() if question == ["--help"] else "\ntrainer:\n"
    assert wanted in answer
    assert list(tmp_path.iterdir()) == []


def test_a_flag_is_one_word_with_its_value() -> None:
    words = ["seed=1", "-cd", "own", "-m", "~a", "trainer.epochs", "--cfg=job", "-cn=c", "--config-path", "d", "b=2"]
    found = cli.words_of(words)
    flags = ["--config-dir=own", "--config-name=c", "--config-path=d"]
    assert found == ["seed=1", flags[0], "-m", "~a", "trainer.epochs", "--cfg=job", *flags[1:], "b=2"]
    assert config_flags([*found, "hydra.searchpath=[d]"]) == [*flags, "hydra.searchpath=[d]"]
    assert cli.with_overrides_of_run([]) == []


def record_of(*words: str, argv: list[str]) -> Any:
    cfg = as_composed("run_dir=.", *words)
    hydra_cfg: Any = OmegaConf.create({"overrides": {"task": list(words)}, "runtime": {"choices": {"model": "mlp"}}})
    return record_config(cfg, check(cfg), hydra_cfg, argv)


def test_a_record_has_what_was_typed_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "secret-word")
    words = ["model=mlp", "+vars.word=${oc.env:WORD}", "+vars.of=${vars.word}", "+vars.in={a:x${vars.of}}", "seed=3"]
    record = record_of(*words, argv=["src/train.py", *words])
    assert record.flat["vars.word"] == "secret-word"
    assert [record.shown[key] for key in ("vars.word", "vars.of", "seed")] == ["${oc.env:WORD}", "${vars.word}", 3]
    assert "secret-word" not in str([record.shown, record.options, record.overrides, record.command, record.files])
    assert yaml.safe_load(record.files["overrides.yaml"]) == words
    assert shlex.split(record.command) == ["python", "src/train.py", *words]
    options = record_of("model=mlp", "model._target_=test_config.Net", argv=["train.py"]).options
    assert options["model"] == "test_config.Net"


def run_of(folder: Path, overrides: list[str], config: dict[str, Any]) -> Path:
    """A run folder with a record alone."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder


@pytest.mark.parametrize("mode", ["evaluate", "predict", "export", "sample"])
def test_a_mode_takes_the_words_of_the_run_but_not_how_it_was_spread_and_saved(tmp_path: Path, mode: str) -> None:
    taken = ["dataset=text", "model=gpt", "model.width=8", "trainer.precision=fp64", "+experiment=x"]
    words = ["strategy=fsdp", "snapshot.keep_last=2", "backend=nccl", "watch.nan=skip"]
    words += ["launch=fork", "launch.nproc_per_node=2", "logger=[csv]", "trainer.compile=true"]
    run = run_of(tmp_path / "run", taken + words, {})
    for resume in (run, run / "snapshots", run / "snapshots" / "step_1"):
        typed = [f"mode={mode}", f"resume={resume}"]
        assert cli.with_overrides_of_run(typed) == [*taken, f"hydra.run.dir={run / mode}", *typed]
    typed = [f"mode={mode}", f"resume={run}", "model=mlp", "hydra.run.dir=out"]
    assert cli.with_overrides_of_run(typed) == [taken[0], *taken[3:], *typed]


@pytest.mark.parametrize(
    ("resume", "said"), [("nowhere", "resume=nowhere does not exist; type resume=<a run"), (".", "is in no run folder")]
)
def test_a_mode_without_a_record_is_refused(tmp_path: Path, resume: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cli.with_overrides_of_run(["mode=evaluate", f"resume={tmp_path if resume == '.' else resume}"])


def with_values(monkeypatch: pytest.MonkeyPatch, *typed: str) -> Any:
    """What `main` makes of the composed config of these words, below HydraConfig."""
    words = cli.with_overrides_of_run(list(typed))
    own = [word for word in words if not word.startswith("hydra.")]
    mode = next(word.partition("=")[2] for word in own if word.startswith("mode="))
    hydra_cfg = OmegaConf.create({"hydra": {"overrides": {"task": own}, "runtime": {"choices": {"mode": mode}}}})
    monkeypatch.setattr(HydraConfig, "get", lambda: hydra_cfg.hydra)
    return cli.with_values_of_run(as_composed("run_dir=.", *own))


def test_the_values_of_the_run_count_where_a_file_says_another_one_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_net = {"trainer": {"ema": 0.9, "precision": "fp64", "compile": True}, "model": {"width": 8, "old": 1}}
    words = ["model=mlp", "parameters.init=old.pt", "task._target_=test_config.Net"]
    config = {"dataset": {"mean": [0.25], "noise": 1e-3}, "loader": {"validation": 0.3}, **of_net}
    config |= {"task": {"own": 1}, "parameters": {"init": "old.pt"}}
    run = run_of(tmp_path, words, config | {"seed": 5, "evaluation": {"batch_size": 3}})
    base = ["mode=evaluate", f"resume={run}"]
    cfg = with_values(monkeypatch, *base)
    assert (cfg.dataset.mean, cfg.loader.validation, cfg.dataset.noise) == ([0.25], 0.3, 1e-3)
    assert (cfg.model.width, cfg.model.old, cfg.task.own) == (8, 1, 1)
    assert (cfg.trainer.ema, cfg.trainer.precision, cfg.trainer.compile) == (0.9, "fp64", False)
    assert (cfg.parameters.init, cfg.parameters.new_layers, cfg.evaluation.batch_size) == (None, [], 128)
    cfg = with_values(monkeypatch, *base, "dataset=mnist", "trainer.ema=null", "model.width=9")
    assert (cfg.dataset.mean, cfg.loader.validation, cfg.trainer.ema, cfg.model.width) == ([0.25], 0.3, None, 9)
    cfg = with_values(monkeypatch, *base, "dataset.mean=[0.5]", "model._target_=test_config.Net")
    assert (cfg.dataset.mean, "old" in cfg.model, cfg.loader.validation) == ([0.5], False, 0.3)
    assert with_values(monkeypatch, "mode=find_lr", f"resume={run}", "model=mlp").model.width == 128


def test_a_run_folder_holds_a_run_of_one_config(tmp_path: Path) -> None:
    record = record_of("model=mlp", argv=["src/train.py"])
    run = run_of(tmp_path / "run", [], {"model": {"_target_": "lockstep.models.tutorial.mlp", "width": 9}})
    require_same_run(record, str(run))  # it has no snapshot
    (run / "snapshots").mkdir()
    (run / "snapshots" / "step_1").touch()
    with pytest.raises(ConfigError, match=r"holds a run with .*; type .* to go on with it, or hydra.run.dir=<a new"):
        require_same_run(record, str(run))
    (run / ".hydra" / "config.yaml").write_text(record.files["config.yaml"].replace("epochs: 5", "epochs: 9"))
    require_same_run(record, str(run))  # how long it trains may change


def test_the_mode_or_the_run_may_stand_in_a_preset(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", ["model=mlp"], {})
    presets = tmp_path / "conf" / "experiment"
    presets.mkdir(parents=True)
    (presets / "judge.yaml").write_text(f"defaults:\n  - override /mode: evaluate\nresume: {run}\n")
    (presets / "again.yaml").write_text(f"resume: {run}\n")
    flags = [f"--config-dir={tmp_path / 'conf'}"]
    for words in (["experiment=judge"], ["experiment=again", "mode=evaluate"], ["mode=evaluate", f"resume={run}"]):
        assert "model=mlp" in cli.with_overrides_of_run([*flags, *words]), words
    for words in (["experiment=again"], ["experiment=judge", "mode=train"], ["experiment=judge", "resume=null"]):
        assert cli.with_overrides_of_run([*flags, *words]) == [*flags, *words]
