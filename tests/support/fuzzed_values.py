"""Values to type behind `key=`: those that a rule of the schema accepts, those just outside of it, and wild ones."""

import math
from typing import Any

from hypothesis import strategies as st

from lockstep.config.schema import Rule, show

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
TARGETS = "os.getcwd torch.nn.Linear torch.nn.Identity torch.optim.RMSprop lockstep.models.mlp.mlp nowhere.Nothing"
TARGETS += " lockstep.strategies.ddp.DDP lockstep.nothing math.pi torch a..b . lockstep.tasks.regression.Regression"
TARGETS += " lockstep.strategies.gradient_sync.Auto lockstep.launchers.env.EnvLauncher torch.optim.SGD"

WILD: list[str] = [
    word for words in (NUMBERS, WORDS, NESTED, INTERPOLATIONS, BROKEN, FUNCTIONS, PATHS) for word in words.split()
] + LETTERS
wild: Text = st.sampled_from(WILD) | st.text(st.characters(exclude_characters="\0"), max_size=6)
targets: Text = st.sampled_from(TARGETS.split())


def typed(rule: Rule) -> Text:
    """A text for a key with this rule. Half of them are values that the rule accepts."""
    return st.one_of(inside(rule), inside(rule), outside(rule), wild)


def inside(rule: Rule) -> Text:
    """Values that the rule accepts. Numbers are small, so that a run with them is, too."""
    item = _item(rule)
    if rule.is_list:
        length = rule.limits.length
        item = st.lists(item, min_size=length or 0, max_size=length or 4)
    values = st.one_of(item, st.just(None)) if rule.nullable else item
    return values.filter(rule.accepts).map(show)


def _item(rule: Rule) -> st.SearchStrategy[Any]:
    """One value of the kind that the rule asks for. Some are outside of its range."""
    limits = rule.limits
    example = rule.example()
    known = [*rule.words, *(example if isinstance(example, list) else [example])]
    low = next((edge for edge in (limits.min, limits.above) if edge is not None), -3)
    if int in rule.kinds:
        return st.sampled_from([*known, int(low), int(low) + 1]) | st.integers(int(low), int(low) + 9)
    if float in rule.kinds:
        edges = [edge for edge in (limits.min, limits.max, limits.above, limits.below) if edge is not None]
        near = [edge + step for edge in edges for step in (-1e-6, 1e-6)]
        return st.sampled_from([*known, *edges, *near]) | st.floats(float(low), float(low) + 2)
    if bool in rule.kinds:
        return st.booleans()
    return st.sampled_from(known)


def outside(rule: Rule) -> Text:
    """Numbers just beyond the edges of a rule, far beyond them, and of the other type."""
    limits = rule.limits
    edges = [edge for edge in (limits.min, limits.max, limits.above, limits.below) if edge is not None]
    numbers = [edge + step for edge in edges for step in (-1, -1e-6, 0, 1e-6, 1)] + [1.5, -1, 0, 10**6, 10**12, 2**64]
    return st.sampled_from([*numbers, math.nan, math.inf, True, None, "text", [], [1], {"a": 1}]).map(show)
