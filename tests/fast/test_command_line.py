"""The command line without a training: questions, the record of a config, and the words of a trained run."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from lockstep import cli
from lockstep.config.check import check
from lockstep.config.record import config_flags, record_config
from lockstep.errors import ConfigError
from support.configs import as_composed


def test_a_flag_is_one_word_with_its_value_and_a_mode_without_a_record_is_refused(tmp_path: Path) -> None:
    words = ["seed=1", "-cd", "own", "-m", "~a", "trainer.epochs", "--cfg=job", "-cn=c", "--config-path", "d", "b=2"]
    found = cli.words_of(words)
    flags = ["--config-dir=own", "--config-name=c", "--config-path=d"]
    assert found == ["seed=1", flags[0], "-m", "~a", "trainer.epochs", "--cfg=job", *flags[1:], "b=2"]
    assert config_flags([*found, "hydra.searchpath=[d]"]) == [*flags, "hydra.searchpath=[d]"]
    assert cli.with_overrides_of_run([]) == []
    with pytest.raises(ConfigError, match="is in no run folder"):
        cli.with_overrides_of_run(["mode=evaluate", f"resume={tmp_path}"])


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


@pytest.mark.parametrize("mode", ["evaluate", "predict", "export", "sample"])
def test_a_mode_takes_the_words_of_the_run_but_not_how_it_was_spread_and_saved(tmp_path: Path, mode: str) -> None:
    taken = ["dataset=text", "model=gpt", "model.width=8", "trainer.precision=fp64", "+experiment=x"]
    words = ["strategy=fsdp", "snapshot.keep_last=2", "backend=nccl", "watch.nan=skip"]
    words += ["launch=fork", "launch.nproc_per_node=2", "logger=[csv]", "trainer.compile=true"]
    run = tmp_path / "run"
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(taken + words))
    (run / ".hydra" / "config.yaml").write_text("{}")
    for resume in (run, run / "snapshots", run / "snapshots" / "step_1"):
        typed = [f"mode={mode}", f"resume={resume}"]
        assert cli.with_overrides_of_run(typed) == [*taken, f"hydra.run.dir={run / mode}", *typed]
    typed = [f"mode={mode}", f"resume={run}", "model=mlp", "hydra.run.dir=out"]
    assert cli.with_overrides_of_run(typed) == [taken[0], *taken[3:], *typed]
