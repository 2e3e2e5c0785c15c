"""Tables of runs, as DataFrames and as text: a row a run, or one for all seeds and folds of a configuration.

pandas is imported where it is needed: every command imports this module.
"""

import difflib
import logging
import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.runs.record import FINISHED, Run, best_of, changes_no_number, find_runs, read_run, seconds_of, state_of
from lockstep.runs.stats import estimate, is_share, over_samples, wilson
from lockstep.text import aligned
from lockstep.text import show as as_word

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

COLUMNS = ("date", "run", "state", "metric", "objective", "test", "best_step", "steps", "speed", "tags", "changed")
OTHERS = ("ranks", "starts", "seconds", "notes", "commit", "source", "command", "folder", "sweep")
NUMBERS = ("objective", "test", "test_low", "test_high", "best_step", "speed")  # which a run may lack
REPEATS = ("seed", "loader.fold", "loader.split_seed")  # keys in which runs of one configuration differ


def is_repeat(word: str) -> bool:
    """Whether an override, such as seed=3, gives another run of the same configuration."""
    return word.lstrip("+").partition("=")[0] in REPEATS


def setting_of(overrides: Iterable[str]) -> list[str]:
    """The overrides that say of which configuration a run is: runs for which they are equal repeat each other."""
    return [word for word in overrides if not is_repeat(word) and not changes_no_number(word)]


def frame(folders: Sequence[str | Path] = ("outputs",)) -> "pd.DataFrame":
    """A row for each run at or below `folders`, with COLUMNS, OTHERS, the config keys and the config groups.

    objective, test: numbers; metric: the objective's name; test_low, test_high: over the samples of the test set. What
    cannot be read is left out with a warning. Raises ConfigError for a folder that is missing.
    """
    runs = []
    for folder in find_runs(folders):
        try:
            runs.append(read_run(folder))
        except ConfigError as error:
            log.warning("%s", error)
    return rows_of_runs(runs)


def rows_of_runs(runs: Sequence[Run]) -> "pd.DataFrame":
    """As `frame`, of runs that have been read."""
    import pandas as pd

    table = pd.DataFrame([_row(run) for run in runs])
    return table if table.empty else table.astype(dict.fromkeys(NUMBERS, float))


def _row(run: Run) -> dict[str, Any]:
    data, test, objective, starts = run["data"], run["test"] or {}, run["objective"], run["starts"]
    name, measured = objective["name"].partition("/")[2], test.get("metrics", {})
    value, held_out = measured.get(name), data.get("validation_samples")
    samples, error = test.get("samples", data.get("test_samples")), test.get("errors", {}).get(name)
    low, high = (value is not None and over_samples(name, value, error, samples)) or (None, None)
    words = [word for word in run["overrides"] if not changes_no_number(word)]
    row = {**run["options"], **run["config"], **{f"test/{key}": one for key, one in measured.items()}}
    row |= {
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(starts[0]["started"])),
        "run": os.path.relpath(run["folder"]),
    }
    row |= {"state": state_of(run), "metric": objective["name"], "direction": objective["mode"]}
    row |= zip(("objective", "best_step"), best_of(run), strict=True)
    row |= {"test": value, "test_low": low, "test_high": high}
    row["test_samples"] = samples if error is None else None  # of shares that are counted
    row |= {"steps": run["steps"], "speed": run["samples_per_second"], "seconds": seconds_of(run)}
    row |= {"ranks": starts[-1]["world_size"], "starts": len(starts), "changed": shlex.join(words)}
    row["setting"] = shlex.join([*run["flags"], *setting_of(words)])
    row |= {key: run[key] for key in ("tags", "notes", "command", "folder", "sweep")}
    row |= {"commit": run["code"].get("commit", "")[:10], "source": run["code"]["source"]}
    row["validation_data"] = data.get("validation_data")
    row["validation_share"] = held_out / data["training_samples"] if held_out else None
    return row


def rho_of(runs: "pd.DataFrame") -> float:
    """For `Estimate.rho`, of repeated runs; 0 if they have not held out several parts of the training data.

    Any two folds, or values of loader.split_seed, train on mostly the same samples, so their numbers are less
    independent than they look.
    """
    config = runs.reindex(columns=["loader.fold", "loader.split_seed", "loader.folds", "loader.validation"])
    if len(set(map(str, config.iloc[:, :2].itertuples(index=False)))) < 2:
        return 0.0
    folds, share = config.iloc[0, 2:]
    if isinstance(folds, int | float) and folds >= 2:
        return float(1 / (folds - 1))
    if runs["validation_data"].nunique() < 2:  # validation data of its own
        return 0.0
    return share / (1 - share) if isinstance(share, float) and share < 1 else float(runs["validation_share"].max())


def settings(runs: "pd.DataFrame") -> "pd.DataFrame":
    """A row for each configuration: runs of one folder and one code that differ only in seed or fold are one.

    runs, count: how many there are, and how many have finished with a number. objective, test: means of these; low,
    high: of the objective's interval; std. Columns in which the runs differ have all values as text. A run with a seed
    that another one has had already is a row of its own. Where all have one metric, the best is the first, before those
    of which runs are missing.
    """
    import pandas as pd

    if runs.empty:
        return runs
    keys = [runs["folder"].map(os.path.dirname), *(runs[name].map(str) for name in ("source", "setting", "metric"))]
    repeats = [runs[name].map(str) for name in REPEATS if name in runs]
    groups = runs.groupby([*keys, runs.groupby([*keys, *repeats]).cumcount()], sort=False)
    rows = [_together(group.to_dict("records")) for _, group in groups]
    if runs["metric"].nunique() == 1:
        sign = -1 if runs["direction"].iloc[0] == "max" else 1
        rows.sort(key=lambda row: (not row["count"], row["count"] < row["runs"], sign * row["objective"]))
    return pd.DataFrame(rows).astype(dict.fromkeys((*NUMBERS, "low", "high", "std"), float))


def _together(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row of `settings`."""
    import pandas as pd

    finished = [run for run in group if run["state"] == FINISHED and _is_there(run["objective"])]
    row = group[0] | {"runs": len(group), "count": len(finished)} | dict.fromkeys(("low", "high", "std"), math.nan)
    if len(group) == 1:
        return row
    for name in group[0]:
        words = dict.fromkeys(as_word(run[name]) for run in group)
        row[name] = group[0][name] if len(words) == 1 else ",".join(words)
    states, parent = Counter(run["state"] for run in group), os.path.dirname(group[0]["folder"])
    row |= {"run": f"{os.path.relpath(parent)} ({len(group)} runs)", "changed": row["setting"]}
    row |= {"date": min(run["date"] for run in group), "seconds": round(sum(run["seconds"] for run in group), 2)}
    row["state"] = ", ".join(name if len(states) == 1 else f"{count} {name}" for name, count in states.items())
    table = pd.DataFrame(finished, columns=[*group[0]])
    row |= {name: table[name].mean() for name in ("speed", "best_step", "steps", "objective", "test")}
    row |= dict.fromkeys(("test_low", "test_high"), math.nan)
    for name, low, high in (("objective", "low", "high"), ("test", "test_low", "test_high")):
        if finished and table[name].notna().all():
            found = estimate(table[name].tolist(), rho_of(table))
            row |= dict(zip((low, high), found.interval or (math.nan, math.nan), strict=True))
            row["std"] = (found.std or math.nan) if name == "objective" else row["std"]
    return row


def check_names(table: "pd.DataFrame", names: Iterable[str], option: str) -> None:
    """Raise ConfigError for a name that is no column, no config key of any run, and no config group."""
    for name in names:
        if name not in table:
            longer = [key for key in table if key == f"{name}._target_" or key.endswith(f".{name}")]
            close = [*longer, *difflib.get_close_matches(name, table, 1, 0.8), "state"][0]
            raise ConfigError(f"no run has {name}; type {option} {close}{'=<value>' * (option == '--filter')}")


def filtered(runs: "pd.DataFrame", filters: Sequence[str]) -> "pd.DataFrame":
    """The runs for which all of `filters` hold, such as "optimizer.lr=0.1" or "tags=baseline", an item of a list."""
    for text in filters:
        key, _, typed = (part.strip() for part in text.partition("="))
        check_names(runs, [key], "--filter")
        runs = runs[[_is_value(value, typed) for value in runs[key]]]
    return runs


def _is_value(value: Any, typed: str) -> bool:
    with suppress(TypeError, ValueError):
        return float(typed) == float(value if not isinstance(value, bool) else "")
    return typed in (as_word(value), str(value)) or (isinstance(value, list) and typed in value)


def ordered(table: "pd.DataFrame", name: str) -> "pd.DataFrame":
    """By a column or a key; rows without a value come last. The best objective comes first, those of one metric
    together; other values go up."""
    check_names(table, [name], "--sort")
    key = table[name]
    if key.dtype == object:
        key = key.map(as_word, na_action="ignore")
    if name == "objective":
        key = key.where(table["direction"] == "min", -key)
    by = table.assign(key=key).sort_values(["metric", "key"] if name == "objective" else "key", kind="stable")
    return table.loc[by.index]


def show(table: "pd.DataFrame", columns: Sequence[str] | None = None) -> list[str]:
    """The lines of a table of `frame` or `settings`. columns: None for COLUMNS, but for those without a value.

    An interval is shown as its half: of several runs over the runs, of one over the samples of the test set.
    """
    metrics = table["metric"].unique()
    if columns is None:
        optional = {name: table[name].map(_is_there).any() for name in ("test", "tags")} | {"metric": len(metrics) > 1}
        columns = [name for name in COLUMNS if optional.get(name, True)]
    check_names(table, columns, "--columns")
    titles = {"objective": f"best {metrics[0]}", "test": f"test/{metrics[0].partition('/')[2]}"}
    titles = titles if len(metrics) == 1 else {}
    rows = [[_text(row, name) for name in columns] for row in table.to_dict("records")]
    numbers = [place for place, name in enumerate(columns) if all(isinstance(one, int | float) for one in table[name])]
    return aligned([[titles.get(name, name) for name in columns], *rows], right=numbers)


def _text(row: Mapping[str, Any], name: str) -> str:
    """A cell, with what stands in other columns."""
    value = row[name]
    if not _is_there(value):
        return "-"
    if name not in ("objective", "test"):
        is_whole = isinstance(value, float) and (name == "speed" or value.is_integer())
        return f"{value:.0f}" if is_whole else as_word(value)
    low, high = ("low", "high") if name == "objective" else ("test_low", "test_high")
    text = f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
    if _is_there(row.get(low)):
        text += f" ± {(row[high] - row[low]) / 2:.2g}"
    if name == "objective" and row.get("count", 0) < row.get("runs", 0):
        text += f" of {row['count']}"
    return text


def _is_there(value: Any) -> bool:
    return bool(value) if isinstance(value, list) else value is not None and bool(value == value)


def choosing(table: "pd.DataFrame") -> str:
    """What the number of the best row of `settings` is worth, in one sentence; empty if there was nothing to choose."""
    candidates = table[table["count"] > 0]
    if len(candidates) < 2 or candidates["metric"].nunique() > 1:
        return ""
    best = candidates.iloc[0]
    metric, test = best["metric"].partition("/")[2], best["test"]
    chosen = f"{best['metric']} {best['objective']:.6g} is the best of {len(candidates)}, and so it is optimistic"
    if best["metric"].startswith("test/"):
        return f"on the test set: {chosen}"
    if not _is_there(test):
        return f"{chosen}; the test set has not been read"
    low, high, source = best["test_low"], best["test_high"], f"{best['count']} runs"
    if is_share(metric) and _is_there(best["test_samples"]):
        samples = int(best["test_samples"])
        (low, high), source = wilson(test, samples), f"{samples} test samples"
    known = f" (95 %: {low:.4g} to {high:.4g}, from {source})" if _is_there(low) else ""
    return f"{chosen}; test/{metric} {test:.6g} had no part in it{known}"
