"""bench/gpu.py runs where there is no GPU, too."""

import sys

from conftest import ROOT

KEPT = "# Results\n\n## Another bench\n\nits table\n"


def test_the_bench_of_one_device_runs_and_keeps_its_tables(start, tmp_path):
    results = tmp_path / "RESULTS.md"
    results.write_text(KEPT)
    start(sys.executable, ROOT / "bench" / "gpu.py", "--quick", f"--write={results}").finish()
    text = results.read_text()
    assert text.startswith(KEPT + "\n## One device: ")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows if "trainer.compile=" not in row] == ["| false", "| fp32", "| bf16", "| false"]
    assert "GFLOP a sample" in text
    assert "failed" not in text
