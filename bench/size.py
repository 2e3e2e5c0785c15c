"""Prints how large src/ is, and what in it other code depends on by accident. No gate: numbers to look at.

python bench/size.py [folder]
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

LIBRARIES = ("torch", "torchvision", "hydra", "omegaconf", "multiprocessing", "tensorboard")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Names with a leading underscore that are imported from a library, or read from one of its modules."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from filter(is_private, names)
            modules |= (
                {alias.asname or alias.name for alias in node.names}
                if not node.module.startswith("lockstep")
                else set()
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            words = ast.unparse(node).split(".")
            if words[0] in modules and words != ["os", "_exit"]:  # which Python documents
                yield ".".join(words)


def is_private(name: str) -> bool:
    words = name.split(".")
    return words[0] in LIBRARIES and any(word.startswith("_") and not word.startswith("__") for word in words)


def outside_assignments(tree: ast.AST) -> Iterator[str]:
    """Attributes that are set on something else than self or cls."""
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    owner = ast.unparse(part.value)
                    if not re.match(r"(self|cls)\b", owner):
                        yield f"{owner}.{part.attr}"


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "src")
    lines, sizes, private, outside = 0, [], [], []
    files = sorted(root.rglob("*.py"))
    for path in files:
        text = path.read_text()
        lines += text.count("\n")
        tree = ast.parse(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        sizes += [(node.end_lineno or 0) - node.lineno + 1 for node in functions]
        outside += [f"{path.relative_to(root)}: {found}" for found in outside_assignments(tree)]
        if path.name != "compat.py":
            private += [f"{path.relative_to(root)}: {found}" for found in sorted(set(private_names(tree)))]
    print(f"lines {lines}, files {len(files)}, functions {len(sizes)} (median {median(sizes):.0f} lines)")
    print(f"private names of libraries outside compat.py: {len(private)}", *private, sep="\n  ")
    print(f"attributes set from outside: {len(outside)}", *outside, sep="\n  ")


if __name__ == "__main__":
    main()
