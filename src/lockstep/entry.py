"""Hydra's side of the door: what the configs may ask us, what their errors say, how the process ends.

No torch here: `--help` and `--cfg job` pass through this room.
"""

import difflib
import gc
import os
import re
import sys
import time
import traceback
from pathlib import Path

from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep import lookout, rendezvous, signals
from lockstep.refusal import Refusal

CONF = Path(__file__).parents[2] / "conf"
MEANINGS = {  # of gloo's words, for whoever reads them at night
    "Timed out waiting": "a rank did not answer within backend.timeout: it hangs, or the network to it is down; look in logs/ for who says more",
    "by peer": "another rank ended before this one; its own error is the one to read, here or in logs/",
}


def register():
    """The two questions a config asks: ${started:format} and ${leader:value}, alike on every rank of one run."""
    OmegaConf.register_new_resolver("started", lambda pattern, _root_: rendezvous.started(composers(_root_.launch)).strftime(pattern), replace=True)
    OmegaConf.register_new_resolver("leader", lambda mine, others=None, *, _root_: mine if composers(_root_.launch).leads else others, replace=True)


def composers(launch):
    """Who composes this run's config beside us: the ranks an outer starter describes, or each node's parent of launch=spawn."""
    if launch.get("nnodes", 1) > 1:
        from lockstep.launch import spawn_node

        return spawn_node(launch.nnodes, launch.node_rank, launch.master_addr, launch.master_port)
    return rendezvous.read()


def resolved(cfg):
    """cfg with every interpolation answered, for processes that have no Hydra. Raises Refusal for a value still missing."""
    try:
        return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        key = re.search(r"Missing mandatory value: (\S+)", str(error))
        key = key[1] if key else error.full_key
        raise Refusal(f"{key} has no usable value ({str(error).splitlines()[0]}); type {key}=<value>") from None


def flat(node, prefix=""):
    """{"trainer.epochs": 5, ...}: the leaves of a config by their full keys."""
    if not isinstance(node, (dict, DictConfig)):
        return {prefix: list(node) if isinstance(node, ListConfig) else node}
    return {key: value for name, child in node.items() for key, value in flat(child, f"{prefix}.{name}" if prefix else str(name)).items()}


def collect_garbage():
    """Have Python's collector run again, and leave alone what a process has imported by now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def enter(main):
    """Run a hydra.main function as a rank should end: a refusal as one sentence, a failure with its traceback, no teardown.

    Never returns. Exit codes: 0 finished, 1 failed, 2 refused, 75 stopped early and resumable.
    """
    gc.disable()  # imports and configs make half a million objects that all stay: looking for garbage among them took 0.2 s
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors over whole, and we say them
    # A job that a Hydra launcher such as submitit starts elsewhere begins in submitit's own script and imports us from there.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CONF.parent / "src"), os.environ.get("PYTHONPATH")]))
    sys.argv = [argument for argument in sys.argv if not argument.startswith(("--local-rank", "--local_rank"))]
    try:
        register()
        if rendezvous.read().starter == "srun":
            signals.listen()  # a job can be preempted while its ranks still import torch, and must not fail for it
        _refuse_a_sampling_sweep(sys.argv[1:])
        main()
        rendezvous.forget(rendezvous.read())
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except signals.Stopped:
        code = signals.RESUMABLE
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        code = _say(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads now and then abort the interpreter's teardown, and the launcher would call a finished run failed.
    os._exit(code)


def _say(error):
    refusal = as_refusal(error)
    if refusal is None:
        _tell_torchrun(error)
        traceback.print_exception(error)
        print("".join(f"lockstep: {meaning}\n" for words, meaning in MEANINGS.items() if words in str(error)), end="", file=sys.stderr)
        lookout.watch_over_agent(os.environ)
        return 1
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(1)  # rank 0 says it; who still lives then (its launcher ends it otherwise) was refused alone
    print(f"lockstep: {refusal}", file=sys.stderr)
    return 2


def _tell_torchrun(error):
    """Leave the exception where torchrun looks for the root cause."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def as_refusal(error):
    """The sentence for an error of the user's input, or None for an error of ours."""
    cause = error
    while cause is not None:  # a resolver's refusal comes wrapped by OmegaConf and by Hydra
        if isinstance(cause, Refusal):
            return cause
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if option.startswith("submitit"):
            return Refusal(f"{group}={option} wants Hydra's submitit launcher; type pip install hydra-submitit-launcher, or launch=slurm without it")
        meant = _closest(option, error.options) or "|".join(error.options)
        return Refusal(f"{group}={option} is not an option (there are: {', '.join(error.options)}); type {group}={meant}")
    if isinstance(error, OverrideParseException):
        return Refusal(f"cannot read {error.override!r} ({error.message.splitlines()[0]}); type key=value, with quotes around special characters")
    if isinstance(error, (ConfigCompositionException, OmegaConfBaseException)):
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        unknown = getattr(cause, "full_key", None)
        typed = str(error).split("'")[1].split("=")[0] if "'" in str(error) else unknown
        if "not in struct" in str(cause) or "Could not override" in str(error):
            meant = _closest(typed, _keys())
            return Refusal(f"{typed} is no key of this config; type {f'{meant}=...' if meant else 'python src/train.py --cfg job to see all keys'}")
        return Refusal(" ".join(str(error).split()))
    return None


def _closest(word, words):
    """The one of `words` that somebody probably meant, or None; by the last part too: `epochs` finds `trainer.epochs`."""
    ends = {candidate.rpartition(".")[2]: candidate for candidate in words}
    match = difflib.get_close_matches(word, words, 1, 0.7) or difflib.get_close_matches(word.rpartition(".")[2], ends, 1, 0.5)
    return ends.get(match[0], match[0]) if match else None


def _keys():
    """Every key of the default config, for suggestions."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return list(flat(OmegaConf.to_container(compose("config", overrides=["run_dir=."]))))


def _refuse_a_sampling_sweep(arguments):
    """A sweeper that draws at random draws differently on each rank; torchrun's ranks would train different jobs."""
    sweeper = next((word.partition("=")[2] for word in arguments if word.startswith("hydra/sweeper=")), "basic")
    if {"-m", "--multirun"} & set(arguments) and sweeper != "basic" and rendezvous.read().size > 1:
        raise Refusal(
            f"hydra/sweeper={sweeper} would draw other values on every rank; type python src/train.py -m launch=torchrun hydra/sweeper={sweeper} ..."
        )
