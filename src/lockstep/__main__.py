"""The command `lockstep`: `lockstep <words>` is `python src/train.py <words>`, and `lockstep table` and `lockstep
compare` are those of `python src/runs.py`.
"""

import os
import sys

from lockstep.source_code import ROOT

VERBS = ("table", "compare")  # of src/runs.py


def main() -> None:
    script = "runs.py" if sys.argv[1:2] and sys.argv[1] in VERBS else "train.py"
    os.execv(sys.executable, [sys.executable, str(ROOT / "src" / script), *sys.argv[1:]])


if __name__ == "__main__":
    main()
