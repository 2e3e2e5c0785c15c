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


NO_FAULT = {  # {what is set from outside: why it may be}
    r"ctx\.\w+": "the context of an autograd function: torch hands it over to be written to",
    r".+\.(grad|data|requires_grad)": "of a tensor: torch documents that they are set",
    r"function\.reduction": "of torch's losses: documented",
    r"torch\.backends\..+|sys\.argv": "settings of torch and of Python: documented",
    r"config\.hydra\..+": "Hydra's nodes in a copy of a config: there is no other way",
    r"_[a-z]\w*\.\w+": "what a module keeps in a private object of its own",
}


def outside_assignments(tree: ast.AST) -> Iterator[str]:
    """Attributes that are set on something else than self or cls, without those that are no fault.

    An object that a function has made by its class may still be built there.
    """
    for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        nodes = list(nodes_of_body(function))
        built = {name for node in nodes if isinstance(node, ast.Assign) for name in names_of_made(node)}
        for found in assigned_attributes(nodes):
            owner = re.split(r"[.\[]", found)[0]
            if owner not in {"self", "cls"} | built and not any(re.fullmatch(pattern, found) for pattern in NO_FAULT):
                yield found


def nodes_of_body(function: ast.AST) -> Iterator[ast.AST]:
    """Those of a function, or of a module, without the functions in it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, ast.FunctionDef):
            yield from nodes_of_body(child)


def names_of_made(node: ast.Assign) -> Iterator[str]:
    """The names that an assignment binds to `SomeClass(...)`, also one of several."""
    names, values = (part.elts if isinstance(part, ast.Tuple) else [part] for part in (node.targets[0], node.value))
    for name, value in zip(names, values, strict=False):
        is_made = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2][:1].isupper()
        if is_made and isinstance(name, ast.Name):
            yield name.id


def assigned_attributes(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    yield f"{ast.unparse(part.value)}.{part.attr}"


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
        if path.name != "compat.py":
            outside += [f"{path.relative_to(root)}: {found}" for found in outside_assignments(tree)]
            private += [f"{path.relative_to(root)}: {found}" for found in sorted(set(private_names(tree)))]
    print(f"lines {lines}, files {len(files)}, functions {len(sizes)} (median {median(sizes):.0f} lines)")
    print(f"private names of libraries outside compat.py: {len(private)}", *private, sep="\n  ")
    print(f"attributes set from outside: {len(outside)}", *outside, sep="\n  ")


if __name__ == "__main__":
    main()
