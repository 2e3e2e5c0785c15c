"""The command `lockstep`: `python src/train.py`, and with one of its verbs as the first word `python src/runs.py`."""

import os
import sys

from lockstep.source_code import ROOT


def main() -> None:
    is_of_runs = sys.argv[1:2] and sys.argv[1] in ("table", "compare", "diff", "samples")
    script = "runs.py" if is_of_runs else "train.py"
    os.execv(sys.executable, [sys.executable, str(ROOT / "src" / script), *sys.argv[1:]])


if __name__ == "__main__":
    main()
