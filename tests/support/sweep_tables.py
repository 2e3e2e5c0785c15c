"""The runs of a sweep, as a test reads them."""

from lockstep.runs.record import best_of, find_runs, read_run, state_of


def runs_of(folder):
    return {path.name: read_run(path) for path in find_runs([str(folder)])}


def states(folder):
    return {name: state_of(run) for name, run in runs_of(folder).items()}


def objectives(folder):
    return {name: best_of(run)[0] for name, run in runs_of(folder).items()}
