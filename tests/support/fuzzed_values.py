"""Values to type behind `key=`: those that a type of the schema accepts, any others, and wild ones."""

import json
import math
from functools import cache
from typing import Any, Literal, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from lockstep.text import show

Text = st.SearchStrategy[str]

NUMBERS = "-1 0 1 2 3 0.5 -0.5 1e-9 1e-320 1e5 1e308 -1e308 1e400 2147483648 9223372036854775808 18446744073709551616"
NUMBERS += " 340282366920938463463374607431768211456 nan inf -inf -0 007 0x10 1_000 1e3 +1 .5 5. 1,5"
WORDS = (
    "null NULL None true False on off yes no auto ??? ~ a a.b a-b a/b a:b a=b == % %s %(x)s {0} $ $x # @ & ! * ? ; |"
)
NESTED = "[] [[]] [1] [null] [1,2,3] [a,b] [0.1,0.2,0.3] [nan] {} {a:1} {a:{b:2}} {1:2} {a:null} [{a:1}] {a:[1,[2]]}"
NESTED += " [${seed}] {a:${seed}} {_target_:os.getcwd} {_target_:1} {_args_:3} {_target_:a.b} {_partial_:3}"
INTERPOLATIONS = "${x} ${seed} ${trainer} ${trainer.epochs} ${oc.env:HOME} ${oc.env:NOT_THERE} ${oc.env:NOT_THERE,null}"
INTERPOLATIONS += (
    " ${oc.decode:'['} ${oc.nope:1} ${.x} ${..seed} ${ ${} ${${seed}} ${hydra:job.num} ${hydra:nope} \\${x}"
)
INTERPOLATIONS += " ${started:%Y} ${started:} ${on_rank_zero:1} ${on_rank_zero:} ${oc.select:nope} ${oc.create:{a:1}}"
INTERPOLATIONS += " a${seed}b ${oc.dict.keys:trainer} ${oc.env:} ${now:%Y} ${run_dir} ${model} ${dataset.shape}"
BROKEN = (
    "' \" 'a \"a a'b [ ] { } [a {a: {a (a) a( ) , a, ,a [,] [a,] {,} {a} {a:1 [1 ${a ${a: \\ a\\ \\, 'a'b '' \"\" ' '"
)
FUNCTIONS = "1,2 a,b range(1,3) choice(1,2) choice() interval(0,1) glob(*) sort(3,1) shuffle(1,2) int(x) int(3.5)"
FUNCTIONS += " float(abc) str([1]) bool(2) json_str({a:1}) extend_list(1) tag(a,1,2) range(0) range(1,2,0) nope(1)"
PATHS = "/etc/passwd /proc/x /dev/null /etc/passwd/x . .. ./x/../y nowhere ~/x file:///x C:\\x"
LETTERS = [
    "é",
    "日本",
    "😀",
    "\u200b",
    "a\u0301",
    "\udcff",
    "x\x1b[0m",
    "\ufeff",
    " ",
    "  ",
    "\t",
    "\n",
    "a b",
    "a\nb",
    "\r",
    "",
]
LETTERS += ["a" * 300, "9" * 400, "[" * 60, "a" * 5000]
TARGETS = "os.getcwd torch.nn.Linear torch.nn.Identity torch.optim.RMSprop lockstep.models.tutorial.mlp nowhere.Nothing"
TARGETS += " lockstep.strategies.ddp.DDP lockstep.nothing math.pi torch a..b . lockstep.tasks.tasks.Regression"
TARGETS += " lockstep.strategies.gradient_sync.Auto lockstep.launchers.env.EnvLauncher torch.optim.SGD"

WILD: list[str] = [
    word for words in (NUMBERS, WORDS, NESTED, INTERPOLATIONS, BROKEN, FUNCTIONS, PATHS) for word in words.split()
] + LETTERS
wild: Text = st.sampled_from(WILD) | st.text(st.characters(exclude_characters="\0"), max_size=6)
targets: Text = st.sampled_from(TARGETS.split())


# Small, so that a run with them is, too.
POOL: list[Any] = [None, True, False, -1, 0, 1, 2, 3, 5, 8, 0.5, 0.01, 0.9, 1.0, 1e-6, -0.5, 1e5, math.nan, math.inf]
POOL += [
    10**6,
    10**12,
    2**64,
    "text",
    "auto",
    "90s",
    "2steps",
    "1epochs",
    "null",
    [],
    [1],
    [0.1],
    [1, 8, 8],
    [1, 2, 3, 4],
]
POOL += [["norm"], ["0"], [0.9, 0.999], {"a": 1}]


def typed(kind: Any, default: Any) -> Text:
    """A text for a key of this type. Two thirds of them are values that the type accepts."""
    return st.one_of(inside(kind, default), inside(kind, default), st.sampled_from(POOL).map(show), wild)


def inside(kind: Any, default: Any) -> Text:
    """Values that the type accepts."""
    found = [value for value in (*words_of(kind), default, *POOL) if accepts(kind, value)]
    return st.sampled_from(found or [default]).map(show)


def words_of(kind: Any) -> list[Any]:
    """The words that a type names."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [word for member in get_args(kind) for word in words_of(member)]


def accepts(kind: Any, value: Any) -> bool:
    try:
        _model(kind).model_validate_json(json.dumps({"value": value}), strict=True)
    except ValidationError:
        return False
    return True


@cache
def _model(kind: Any) -> type[BaseModel]:
    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    return create_model("Model", __config__=config, value=(kind, ...))
