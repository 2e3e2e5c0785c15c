"""Small trainings, and how they run with the project's own worker on pretended GPUs, and on the CPU."""

import math
import os
import sys
import traceback
from pathlib import Path

from lockstep.data import loader
from lockstep.training import exchange, loop
from pretend_gpu import device
from support.commands import ema
from support.configs import composed, parts_of, record_of
from support.digits import FEW
from support.worlds import train

GPUS = 8
BASE = ["trainer.max_steps=14", "trainer.epochs=9", FEW, "logging.every=1000", "logger=[]"]
BASE += ["watch.weights_every=5", "backend.timeout=100"]
MIX = "loader.batch_transforms=[{_target_:torchvision.transforms.v2.MixUp,alpha:1.0,num_classes:10}]"
EMPTY = ["trainer.batch_size=359", "trainer.max_steps=4"]  # of 360 samples: an epoch's last batch is one sample
VIEW = ["model._target_=support.models.Viewing", "+model.norms=1", "trainer.channels_last=false"]
PLAN = "strategy.parallelize_plan=[{1:colwise},{4:rowwise}]"
ALL = ["trainer.gradient_accumulation_steps=2", "trainer.max_grad_norm=1"]
ALL += ["loader.augment={_target_:lockstep.data.augment.ShiftFlip,pad:1,flip:true}"]
FP16 = ["trainer.precision=fp16", "sync_bn=off"]

# Once in 5 steps, as watch.weights_every says, the ranks' weights are compared.
COMPARED = {"exchange.py:require_same_weights": 0.2}
# torch's GradScaler reads whether a gradient was infinite where the optimizer is not fused.
UNFUSED = {"grad_scaler.py:<genexpr>": 1.0} | COMPARED
# A share of one value or none is compared with the count of all ranks.
ALONE = {"sync_batch_norm.py:moments": 2.0} | COMPARED
# torch's hook waits for the device in each step after the tenth.
POWERSGD = {"gradient_sync.py:one_bucket_at_a_time": 0.4, "a thread of gloo": 0.4} | COMPARED
# For the smaller batch at an epoch's end torch sets up its stages anew.
SMALLER_BATCH = {"pipeline.py:_run": 0.15} | COMPARED

SCENARIOS = {
    "one GPU": (1, [], {}),
    "ddp": (2, ["sync_bn=off"], COMPARED),
    "accumulation, clipping, averages": (2, [*ALL, ema(0.9), "optimizer=adamw", "sync_bn=off"], COMPARED),
    "checkpointed blocks": (2, ["trainer.checkpoint_activations=['layer*']", "sync_bn=on"], COMPARED),
    "sync_bn": (2, ["sync_bn=on"], COMPARED),
    "sync_bn, bf16, a share without samples": (2, [*EMPTY, "trainer.precision=bf16"], ALONE),
    "sync_bn, a view of a share without samples": (2, [*EMPTY, *VIEW], ALONE),
    "bf16": (2, ["trainer.precision=bf16", "sync_bn=off"], COMPARED),
    "fp16, fused": (2, FP16, COMPARED),
    "fp16, muon": (2, [*FP16, "optimizer=muon_sgd"], UNFUSED),
    # torch looks at the range of class numbers in one_hot, but not of those on a real GPU.
    "mixup": (2, ["sync_bn=off", MIX], COMPARED | {"loader.py:_loaded": 2}),
    "gradient_sync=bf16": (2, ["gradient_sync=bf16", "sync_bn=off"], COMPARED),
    "gradient_sync=ring": (2, ["gradient_sync=ring", "sync_bn=off"], COMPARED),
    "fsdp": (2, ["strategy=fsdp", "sync_bn=off"], COMPARED),
    "fsdp, bf16": (2, ["strategy=fsdp", "model=mlp", "trainer.precision=bf16"], COMPARED),
    "tensor_parallel": (2, ["strategy=tensor_parallel", "model=mlp", PLAN], COMPARED),
    "pipeline": (2, ["strategy=pipeline", "model=mlp"], SMALLER_BATCH),
    "virtual_ranks": (2, ["strategy=virtual_ranks", "trainer.deterministic=true"], COMPARED),
    "model_parallel": (1, ["strategy=model_parallel", "model=toy_parallel", *ALL[:2], ema(0.9)], COMPARED),
    "data_parallel": (1, ["strategy=data_parallel", "model=mlp"], {}),
    "data_parallel, bf16": (1, ["strategy=data_parallel", "trainer.precision=bf16", "model=mlp"], {}),
    "async_parameter_server": (2, ["strategy=async_parameter_server"], COMPARED),
    # The last one: it goes on in gloo's threads, which may still be busy at the end.
    "gradient_sync=powersgd": (2, ["gradient_sync=powersgd", "sync_bn=off"], POWERSGD),
    "gloo beside GPUs": (2, ["backend.name=gloo", "sync_bn=off"], {}),
}


# On Apple's GPU, in one process.
MPS = {
    "convnet": [ema(0.9)],
    "dropout and others": [
        *("model=mlp", "optimizer=adamw", *ALL[:2], "model.dropout=0.3", "task.class_weights=[1,2,3,4,5,6,7,8,9,10]")
    ],
    "mixup": ["model=mlp", MIX],
    "regression": ["dataset=random", "dataset.samples=61", "model=mlp"],
    "bf16": ["trainer.precision=bf16"],
    "bf16-true": ["trainer.precision=bf16-true"],
}


def small_training(folder, *words, backend="nccl"):
    base = [word for word in BASE if word != FEW or "dataset=random" not in words]
    return composed(f"run_dir={folder}", *base, f"backend.name={backend}", *words)


def trained_on_gpus(configs, gpus=GPUS, of="cuda"):
    """Of each training {"error": "file:line Error: words" of what has failed, "waits": {place: of the host in a step,
    after the first one}, "collectives", "products", "weights_moved": as `device.Seen` has them}. They are for the same
    kind of device and backend."""
    loader.VALUES_AT_ONCE = 1  # else the first step loads the whole epoch of so few samples
    exchange.LONG = math.inf  # a slow machine reads at once
    device.pretend(gpus, "gloo" if of == "mps" else configs[0].backend.name, of)
    batches, end_epoch, seen = loader.Loader.batches, loop.end_epoch, device.seen

    def counted(*args, **options):
        for batch in batches(*args, **options):
            seen.counting = seen.step > 0
            seen.step += 1
            yield batch

    def uncounted(*args):
        seen.counting = False
        return end_epoch(*args)

    loader.Loader.batches, loop.end_epoch = counted, uncounted
    found = []
    for cfg in configs:
        seen.__init__()
        error = ""
        try:
            train(cfg)
        except BaseException as raised:
            frames = [f for f in traceback.extract_tb(raised.__traceback__) if "/src/lockstep/" in f.filename]
            place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} " if frames else ""
            error = f"{place}{type(raised).__name__}: {str(raised)[:300]}"
            traceback.print_exc()
        waits = {place: round(count / max(1, seen.step - 1), 2) for place, count in seen.waits.items()}
        as_seen = {"collectives": seen.collectives, "products": dict(seen.products)}
        found.append({"error": error, "waits": waits, "weights_moved": seen.weights_moved} | as_seen)
    return found


def worked(cfg, gpus, of="cuda"):
    """What the mode of a command does, on pretended GPUs, or on the CPU if there are none."""
    if gpus:
        device.pretend(gpus, "gloo" if of == "mps" else cfg.backend.name, of)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    parts = parts_of(cfg)
    parts.mode.work(cfg, record_of(cfg), parts)
