"""Constraints between the values of a job, such as "optimizer.lr * trainer.epochs <= 10". Nothing is executed."""

import ast
import operator
from collections.abc import Callable, Mapping

from lockstep.errors import ConfigError

KEY = "sweep.constraints"
EXAMPLE = f"{KEY}=['optimizer.lr * trainer.epochs <= 10']"
ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class Constraint:
    """One comparison, or a chain of them, of keys, numbers, + - * / and parentheses. keys: those that it names.

    Raises ConfigError for anything else.
    """

    def __init__(self, text: str) -> None:
        self.text, self.keys = text, dict[str, None]()
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise self._unreadable(text) from None
        if not isinstance(tree, ast.Compare):
            raise ConfigError(f"{KEY}: {text} compares nothing; type {EXAMPLE}")
        for comparison in tree.ops:
            if type(comparison) not in COMPARISONS:
                raise self._unreadable(text)
        self.comparisons = [COMPARISONS[type(comparison)] for comparison in tree.ops]
        self.sides = [tree.left, *tree.comparators]
        for side in self.sides:
            self._read(side)

    def holds(self, values: Mapping[str, object]) -> bool:
        """values: of the keys that it names, which a job has. Raises ConfigError for a value that is no number."""
        for key in self.keys:
            if key not in values:
                raise ConfigError(f"{KEY}: {self.text} names {key}, which is no key of a job; type {EXAMPLE}")
            value = values[key]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{KEY}: {self.text} wants a number, and {key} is {value}; type {key}=<a number>")
        try:
            numbers = [self._number(side, values) for side in self.sides]
        except ArithmeticError as error:
            raise ConfigError(f"{KEY}: {self.text} cannot be computed ({error}); type {EXAMPLE}") from None
        pairs = zip(self.comparisons, numbers[:-1], numbers[1:], strict=True)
        return all(compare(left, right) for compare, left, right in pairs)

    def _read(self, node: ast.expr) -> None:
        """Note the keys of an expression."""
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            self._read(node.left)
            self._read(node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            self._read(node.operand)
        elif not (isinstance(node, ast.Constant) and type(node.value) in (int, float)):
            self.keys[self._dotted(node)] = None

    def _dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self._dotted(node.value)}.{node.attr}"
        if isinstance(node, ast.Name):
            return node.id
        raise self._unreadable(ast.unparse(node))

    def _number(self, node: ast.expr, values: Mapping[str, object]) -> float:
        if isinstance(node, ast.BinOp):
            return ARITHMETIC[type(node.op)](self._number(node.left, values), self._number(node.right, values))
        if isinstance(node, ast.UnaryOp):
            return -self._number(node.operand, values)
        found = node.value if isinstance(node, ast.Constant) else values[self._dotted(node)]
        assert isinstance(found, int | float)
        return found

    def _unreadable(self, part: str) -> ConfigError:
        what = "" if part == self.text else f": {part}"
        return ConfigError(
            f"{KEY}: {self.text} cannot be read{what}; type keys, numbers, + - * / and a comparison, such as {EXAMPLE}"
        )
