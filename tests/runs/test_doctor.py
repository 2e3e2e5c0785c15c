"""`lockstep doctor`, and the warning of a precision that this CPU does not have."""

import sys
from collections.abc import Callable

from lockstep.distributed.host import has_native_bf16
from support.commands import ROOT, Command


def test_the_doctor_names_what_works_and_what_to_type(start: Callable[..., Command]) -> None:
    command = f"ulimit -Sn 200; {sys.executable} -m lockstep doctor"
    output = start("bash", "-c", command, PYTHONPATH=ROOT / "src", OMP_NUM_THREADS="64").finish().output
    rows = {line[:13].strip(): line[13:] for line in output.splitlines()}
    assert rows["versions"].startswith("ok    python 3.")
    assert rows["open files"].startswith("look  at most 200; type ulimit -n 4096")
    assert rows["threads"].startswith("look  OMP_NUM_THREADS=64 a rank; type unset OMP_NUM_THREADS")
    assert rows["bf16"].startswith("ok" if has_native_bf16() else "look")
    assert rows["two ranks"].startswith("ok    met in ")
    assert "a sum of 4 MiB takes" in rows["two ranks"]


def test_bf16_on_a_cpu_without_it_gets_a_warning(train: Callable[..., Command]) -> None:
    output = train("model=mlp", "trainer.precision=bf16", "trainer.max_steps=1").finish().output
    assert ("bf16 is about 8 times slower than fp32; type trainer.precision=fp32" in output) != has_native_bf16()
