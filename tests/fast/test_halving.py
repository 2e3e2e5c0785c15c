"""Successive halving: which jobs go on, from the results alone."""

import random

import pytest

from lockstep.sweeps.halving import climb, rung_epochs


def test_the_rungs_are_powers_of_eta_up_to_the_epochs_of_a_job():
    assert rung_epochs(1, 3, 9) == [1, 3, 9]
    assert rung_epochs(1, 3, 26) == [1, 3, 26]  # 9 is too near to the end
    assert rung_epochs(1, 2, 9) == [1, 2, 4, 9]
    assert rung_epochs(4, 3, 5) == [4, 5]


def test_a_job_is_promoted_as_soon_as_it_is_sure_of_its_place():
    """Of 4 jobs with eta=2, two go on. When one result is missing, the best of the others is sure of its place."""
    results = {0: {1: 0.5}, 1: {1: 0.9}, 2: {1: 0.7}}
    now = climb(range(4), results, set(), [1, 2, 4], 2, "max")
    assert now.to_run == [(3, 1), (1, 2)]
    assert now.out == {0}  # two are better already
    now = climb(range(4), results | {3: {1: 0.8}}, set(), [1, 2, 4], 2, "max")
    assert now.to_run == [(1, 2), (3, 2)]
    assert now.out == {0, 2}


def test_the_direction_of_the_objective_ties_and_nan():
    results = {0: {1: 0.5}, 1: {1: float("nan")}, 2: {1: 0.5}, 3: {1: 0.6}}
    assert climb(range(4), results, set(), [1, 4], 4, "min").to_run == [(0, 4)]
    assert climb(range(4), results, set(), [1, 4], 4, "max").to_run == [(3, 4)]
    two = climb(range(4), results, set(), [1, 4], 2, "min")
    assert two.to_run == [(0, 4), (2, 4)]


def test_a_failed_job_is_the_last_of_its_rung_and_blocks_none():
    results = {1: {1: 0.1}, 2: {1: 0.2}}
    now = climb(range(3), results, {0}, [1, 3], 3, "min")
    assert now.to_run == [(1, 3)]
    assert now.out == {2}
    assert climb(range(3), {}, {0, 1, 2}, [1, 3], 3, "min").to_run == []


def test_later_values_of_a_list_let_more_jobs_go_on():
    """A job that ended below the top goes on when the list has become longer."""
    results = {0: {1: 0.1, 3: 0.05}, 1: {1: 0.2}, 2: {1: 0.3}}
    assert climb(range(3), results, set(), [1, 3], 3, "min").out == {1, 2}
    longer = results | {number: {1: 1.0 + number} for number in (3, 4, 5)}
    assert climb(range(6), longer, set(), [1, 3], 3, "min").to_run == [(1, 3)]


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_the_same_jobs_go_on_in_whatever_order_they_end(slots):
    """27 jobs, whose results are known in advance, end in random orders. The final results are those of full rungs."""
    chance = random.Random(0)
    value = {(job, epochs): chance.random() for job in range(27) for epochs in (1, 3, 9)}
    expected = {(job, 1) for job in range(27)}
    for rung, above, count in ((1, 3, 9), (3, 9, 3)):
        members = [job for job, epochs in expected if epochs == rung]
        expected |= {(job, above) for job in sorted(members, key=lambda job: value[job, rung])[:count]}
    for _ in range(20):
        assert run_in_random_order(value, slots, chance) == expected


def run_in_random_order(value: dict[tuple[int, int], float], slots: int, chance: random.Random) -> set[tuple[int, int]]:
    """{(job, epochs)} of all parts that are run."""
    results: dict[int, dict[int, float]] = {}
    running: list[tuple[int, int]] = []
    while True:
        ready = climb(range(27), results, set(), [1, 3, 9], 3, "min").to_run
        running += [part for part in ready if part not in running][: slots - len(running)]
        if not running:
            return {(job, epochs) for job, values in results.items() for epochs in values}
        job, epochs = running.pop(chance.randrange(len(running)))
        results.setdefault(job, {})[epochs] = value[job, epochs]
