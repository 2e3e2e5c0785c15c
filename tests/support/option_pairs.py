"""Every two options of two groups in one command: it makes a step on two ranks, or is refused in a sentence."""

import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from support.commands import ROOT
from support.small_commands import Answer, answer_of
from support.small_data import write_small_data

CONF = ROOT / "conf"
NOT_COMBINED = ("experiment", "hydra", "local", "mode")  # a preset is a choice of the other groups; modes need a run
NOT_HERE = ("launch=slurm",)  # its answer is the cluster's
# New processes would refuse the small files for their checksums; support.small_commands does not look at them.
NOT_TOGETHER = [
    {data, f"launch={name}"} for data in ("dataset=cifar10", "model=airbench") for name in ("spawn", "torchrun")
]
ALONE = ("backend=nccl", "backend=mpi")  # refused for the machine's sake: the other option does not matter
TWO_RANKS = "launch=fork"
ONE_STEP = ["trainer.max_steps=1", "trainer.batch_size=16"]
LIMIT = 300.0  # seconds of a command
# What an option needs in addition, where the other one does not say it.
NEEDS = {
    "dataset=huggingface": ["dataset.classes=2", "dataset.size=32"],
    "dataset=image_folder": ["dataset.classes=2", "dataset.size=32"],
    "dataset=image_csv": ["dataset.classes=2", "dataset.size=32"],
    "dataset=random": ["model=linear"],
    "dataset=shards": ["dataset.classes=2", "dataset.size=32"],
    "model=airbench": ["dataset=cifar10", "model.widths=[8,16,16]"],
    "strategy=data_parallel": ["launch=env"],
}


class Pair(NamedTuple):
    first: str
    second: str

    @property
    def words(self) -> list[str]:
        words = [word for word in self if word]
        for extra in [needed for word in words for needed in NEEDS.get(word, [])] + [TWO_RANKS]:
            if _group(extra) not in map(_group, words):
                words.append(extra)
        return words + ONE_STEP


def _group(word: str) -> str:
    return word.partition("=")[0]


def options() -> dict[str, list[str]]:
    """{group: its options as words}, without the option that conf/config.yaml chooses: every command has that one."""
    chosen = _defaults()
    return {
        folder.name: [
            f"{folder.name}={path.stem}"
            for path in sorted(folder.glob("*.yaml"))
            if path.stem not in chosen.get(folder.name, []) and f"{folder.name}={path.stem}" not in NOT_HERE
        ]
        for folder in sorted(CONF.iterdir())
        if folder.is_dir() and folder.name not in NOT_COMBINED
    }


def pairs() -> list[Pair]:
    """Each option by itself, then each two options of two groups."""
    groups = options()
    alone = [Pair(word, "") for words in groups.values() for word in words]
    both = [
        Pair(first, second)
        for one, other in itertools.combinations(groups, 2)
        for first, second in itertools.product(groups[one], groups[other])
        if first not in ALONE and second not in ALONE and {first, second} not in NOT_TOGETHER
    ]
    return alone + both


def _defaults() -> dict[str, list[str]]:
    """{group: the options that conf/config.yaml chooses}."""
    found: dict[str, list[str]] = {}
    for entry in OmegaConf.load(CONF / "config.yaml").defaults:
        if not isinstance(entry, str):
            for group, option in entry.items():
                found[str(group)] = [option] if isinstance(option, str) else list(option or [])
    return found


def answers(folder: Path, chosen: list[Pair], at_once: int = 1) -> Iterator[tuple[Pair, Answer]]:
    """What the command of each chosen pair answers, in their order. at_once: commands side by side."""
    data = write_small_data(folder / "data")

    def run(numbered: tuple[int, Pair]) -> tuple[Pair, Answer]:
        number, pair = numbered
        place = folder / str(number)
        place.mkdir()
        return pair, answer_of(pair.words, place, LIMIT, LOCKSTEP_DATA=str(data))

    with ThreadPoolExecutor(at_once) as threads:
        yield from threads.map(run, enumerate(chosen))


def page(found: list[tuple[Pair, Answer]]) -> str:
    """docs/option_pairs.md: the pairs that are refused, with their sentences."""
    refused = [(pair, sentence_of(answer)) for pair, answer in found if answer.code]
    tested = "Each command below ran with `" + " ".join([TWO_RANKS, *ONE_STEP]) + "` where it names no launcher. "
    tested += "What an option needs was added where the pair did not name it: "
    tested += "; ".join(f"`{word}` ran with `{' '.join(needed)}`" for word, needed in NEEDS.items()) + "."
    lines = [
        "# Pairs of options",
        "",
        f"{len(found)} commands, each with one option or two options of two groups of `conf/`, beside the defaults: "
        f"{len(found) - len(refused)} train a step on two ranks, {len(refused)} are refused with the sentence below. "
        f"{tested} `make pairs` writes this page, and a drill checks it.",
        "",
        "| options | refused, because |",
        "|---|---|",
    ]
    for pair, sentence in refused:
        lines.append(row(pair, sentence))
    return "\n".join(lines) + "\n"


def row(pair: Pair, sentence: str) -> str:
    """The line of a refused pair in docs/option_pairs.md."""
    return f"| {' '.join(f'`{word}`' for word in pair if word)} | {sentence} |"


def sentence_of(answer: Answer) -> str:
    """The sentence of a refusal, without what differs between machines."""
    text = answer.sentences[-1].removeprefix("lockstep: ") if answer.sentences else answer.output
    return re.sub(r"/\S*/", ".../", text).replace("|", "\\|")
