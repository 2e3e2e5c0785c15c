"""The command `lockstep`: `lockstep <words>` is `python src/train.py <words>`, `lockstep table` is `python src/runs.py
table`, and so on. `lockstep doctor` shows what this machine can do.
"""

import os
import sys

from lockstep.errors import EXIT_FAILED, EXIT_FINISHED
from lockstep.source_code import ROOT

VERBS = ("table", "compare", "why", "again")  # of src/runs.py


def main() -> None:
    if sys.argv[1:] == ["doctor"]:
        from lockstep.doctor import examine

        sys.exit(EXIT_FINISHED if examine() else EXIT_FAILED)
    script = "runs.py" if sys.argv[1:2] and sys.argv[1] in VERBS else "train.py"
    os.execv(sys.executable, [sys.executable, str(ROOT / "src" / script), *sys.argv[1:]])


if __name__ == "__main__":
    main()
