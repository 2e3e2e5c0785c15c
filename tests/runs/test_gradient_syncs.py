"""Trainings with each way of averaging gradients: exact ones agree, approximations differ by what they round off."""

from collections import Counter
from pathlib import Path
from typing import Any

from support.configs import composed
from support.worlds import distance, in_world, same_bits, train, train_all, weights

SMALL = ["model=mlp", "model.width=32", "trainer.max_steps=6", "strategy.bucket_cap_mb=0.001", "logger=[]"]


def sums_of(configs: list[Any]) -> list[Counter[str]]:
    """Trainings in this rank -> for each how often each of this project's ways of adding up took a bucket."""
    from lockstep.distributed.shared_memory import SharedMemorySum
    from lockstep.strategies import gradient_sync

    found: list[Counter[str]] = []

    def counted(name: str, add_up: Any) -> Any:
        def add(*args: Any) -> None:
            found[-1][name] += 1
            add_up(*args)

        return add

    gradient_sync.ring_sum = counted("ring", gradient_sync.ring_sum)
    gradient_sync.server_sum = counted("parameter_server", gradient_sync.server_sum)
    SharedMemorySum.__call__ = counted("shared_memory", SharedMemorySum.__call__)  # type: ignore[method-assign]
    for cfg in configs:
        found.append(Counter())
        train(cfg)
    return found


def trained(folder: Path, size: int, **runs: list[str]) -> dict[str, Any]:
    """{name: weights} of runs, each a list of overrides, in one world."""
    in_world(size, train_all, [composed(f"run_dir={folder / name}", *SMALL, *more) for name, more in runs.items()])
    return {name: weights(folder / name) for name in runs}


def test_topologies_end_in_the_same_weights_with_many_buckets(tmp_path: Path) -> None:
    names = ["all_reduce", "ring", "parameter_server", "shared_memory", "auto"]
    double = ["trainer.precision=fp64", "trainer.gradient_accumulation_steps=2"]
    configs = [composed(f"run_dir={tmp_path / name}", *SMALL, *double, f"gradient_sync={name}") for name in names]
    (all_reduce, *sums), *others = in_world(3, sums_of, configs)
    assert others == [[all_reduce, *sums]] * 2
    assert not all_reduce
    assert [list(one) for one in sums] == [["ring"], ["parameter_server"], ["shared_memory"], ["shared_memory"]]
    assert min(one.total() for one in sums) >= 2 * 6  # several buckets in most of the six steps
    found = {name: weights(tmp_path / name) for name in names}
    assert max(distance(found["all_reduce"], found[name]) for name in names) <= 1e-12


def test_approximations_differ_by_what_they_round_off(tmp_path: Path) -> None:
    same = ["trainer.precision=fp64", "scheduler=constant"]
    runs = {name: [*same, f"gradient_sync={name}"] for name in ("all_reduce", "fp16", "bf16")}
    runs |= {"powersgd": [*same, "gradient_sync=powersgd", "gradient_sync.start_step=3"]}
    runs |= {"late": [*same, "gradient_sync=powersgd", "gradient_sync.start_step=100"]}
    found = trained(tmp_path, 2, **runs)
    errors = {name: distance(found["all_reduce"], values) for name, values in found.items()}
    assert errors["late"] < 1e-12  # plain all-reduce before its first step
    assert 1e-9 < errors["fp16"] < errors["bf16"] < 1e-2  # 11 bits and 8 bits
    assert 1e-4 < errors["powersgd"] < 0.2


def test_a_world_of_one_has_nothing_to_average(tmp_path: Path) -> None:
    trained(tmp_path, 1, plain=["gradient_sync=all_reduce"], ring=["gradient_sync=ring"], bf16=["gradient_sync=bf16"])
    assert same_bits(tmp_path / "plain", tmp_path / "ring")
    assert same_bits(tmp_path / "plain", tmp_path / "bf16")
