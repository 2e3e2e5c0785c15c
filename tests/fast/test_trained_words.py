"""The command of a trained run as the base of mode=evaluate and its like."""

from pathlib import Path

import pytest

from lockstep.cli_modes import with_trained_run


@pytest.mark.parametrize("mode", ["evaluate", "predict", "export"])
def test_how_a_run_was_spread_and_saved_is_not_taken_over(tmp_path: Path, mode: str) -> None:
    """A sharded format would be refused without the strategy that makes parts."""
    words = ["dataset=digits", "strategy=fsdp", "snapshot.format=sharded", "snapshot.every=50steps"]
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in words))
    typed = [f"mode={mode}", f"resume={tmp_path}", "mode.snapshot=best"]
    found = with_trained_run(["train.py", *typed])
    assert [word for word in found if not word.startswith("hydra.run.dir=")] == ["train.py", "dataset=digits", *typed]
