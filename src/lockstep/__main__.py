"""The command `lockstep`: `python src/train.py`, and with one of its verbs as the first word `python src/runs.py`."""

import os
import sys

from lockstep.source_code import ROOT


def main() -> None:
    script = "runs.py" if {*sys.argv[1:2]} & {"table", "compare", "diff", "samples"} else "train.py"
    os.execv(sys.executable, [sys.executable, str(ROOT / "src" / script), *sys.argv[1:]])


if __name__ == "__main__":
    main()
