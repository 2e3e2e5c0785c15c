"""Trainings on pretended GPUs: they run with all tensors of a computation on one device, the host waits for none, the
ranks call the same collectives, and the weights are those of the CPU."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.targets import instantiate_as
from lockstep.data.dataset import InMemoryDataset
from lockstep.distributed.world import init_distributed
from lockstep.errors import ConfigError
from lockstep.launchers.env import EnvLauncher
from lockstep.preflight import check_options
from lockstep.strategies.data_parallel import UnevenDataParallel
from lockstep.tasks.base import Task
from pretend_gpu import device
from pretend_gpu.models import TakesDict
from pretend_gpu.scenarios import GPUS, trained_on_gpus, worked
from support.configs import composed
from support.worlds import distance, in_world, train, weights

BASE = ["trainer.max_steps=14", "trainer.epochs=9", "dataset.train.train=false", "logging.every=1000", "logger=[]"]
BASE += ["watch.every=5", "backend.timeout=100"]
MIX = "dataset.batch_transforms=[{_target_:lockstep.data.transforms.MixUp,alpha:1.0,classes:10},"
MIX += "{_target_:lockstep.data.transforms.RandomErasing,p:0.5}]"
EMPTY = ["trainer.batch_size=359", "trainer.max_steps=4"]  # of 360 samples: an epoch's last batch is one sample
FP16 = ["trainer.precision=fp16", "sync_bn=off"]

# Once in 5 steps, as watch.every says, the ranks' weights are compared.
COMPARED = {"weight_check.py:check_now": 0.2}
# torch's GradScaler reads whether a gradient was infinite where the optimizer is not fused.
UNFUSED = {"grad_scaler.py:<genexpr>": 1.0} | COMPARED
# A share of one value or none is compared with the count of all ranks.
ALONE = {"sync_batch_norm.py:_normalised": 2.0} | COMPARED
# torch's hook waits for the device.
POWERSGD = {"gradient_sync.py:one_bucket_at_a_time": 0.4, "a thread of gloo": 0.2} | COMPARED
# In its first passes fsdp looks for weights that a forward pass changes.
FIRST_PASSES = {"fsdp.py:_sums": 6.0} | COMPARED

SCENARIOS: dict[str, tuple[int, list[str], dict[str, float]]] = {
    "one GPU": (1, [], {}),
    "ddp": (2, ["sync_bn=off"], COMPARED),
    "accumulation, clipping, averages": (
        2,
        [
            "trainer.gradient_accumulation_steps=2",
            "trainer.max_grad_norm=1",
            "trainer.ema=0.9",
            "optimizer=adamw",
            "sync_bn=off",
        ],
        COMPARED,
    ),
    "accumulation that may grow": (2, ["trainer.gradient_accumulation_steps=auto", "sync_bn=off"], COMPARED),
    "checkpointed blocks": (2, ["trainer.checkpoint_activations=['layer*']", "sync_bn=on"], COMPARED),
    "sync_bn": (2, ["sync_bn=on"], COMPARED),
    "sync_bn, bf16, a share without samples": (2, [*EMPTY, "trainer.precision=bf16"], ALONE),
    "sync_bn, a view of a share without samples": (
        2,
        [*EMPTY, "model._target_=pretend_gpu.models.Viewing", "~model.shape", "trainer.channels_last=false"],
        ALONE,
    ),
    "bf16": (2, ["trainer.precision=bf16", "sync_bn=off"], COMPARED),
    "fp16, fused": (2, FP16, COMPARED),
    "fp16, unfused": (2, [*FP16, "optimizer.fused=false"], UNFUSED),
    "fp16, muon": (2, [*FP16, "optimizer=muon_sgd"], UNFUSED),
    "mixup and erasing": (2, ["sync_bn=off", MIX], COMPARED),
    "gradient_sync=bf16": (2, ["gradient_sync=bf16", "sync_bn=off"], COMPARED),
    "gradient_sync=ring": (2, ["gradient_sync=ring", "sync_bn=off"], COMPARED),
    "gradient_sync=powersgd": (
        2,
        ["gradient_sync=powersgd", "sync_bn=off"],
        POWERSGD,
    ),
    "gradient_sync=local_sgd, adamw": (
        2,
        ["gradient_sync=local_sgd", "optimizer=adamw", "optimizer.fused=false", "sync_bn=off"],
        COMPARED,
    ),
    "gradient_sync=local_sgd, muon": (2, ["gradient_sync=local_sgd", "optimizer=muon", "model=mlp"], COMPARED),
    "fsdp": (2, ["strategy=fsdp", "sync_bn=off"], FIRST_PASSES),
    "fsdp, bf16": (2, ["strategy=fsdp", "model=mlp", "trainer.precision=bf16"], FIRST_PASSES),
    "fsdp with replicas": (4, ["strategy=fsdp", "strategy.replicas=2", "sync_bn=off"], FIRST_PASSES),
    "tensor_parallel": (
        2,
        ["strategy=tensor_parallel", "model=mlp", "strategy.plan=[{1:colwise},{4:rowwise}]"],
        COMPARED,
    ),
    "pipeline": (2, ["strategy=pipeline", "model=mlp"], COMPARED),
    "virtual_ranks": (2, ["strategy=virtual_ranks", "trainer.deterministic=true"], COMPARED),
    "model_parallel": (
        1,
        ["strategy=model_parallel", "model=toy_parallel", "trainer.max_grad_norm=1", "trainer.ema=0.9"],
        COMPARED,
    ),
    "model_parallel, local_sgd": (
        2,
        [
            "strategy=model_parallel",
            "model=toy_parallel",
            "gradient_sync=local_sgd",
            "strategy.gradient_as_bucket_view=false",
        ],
        COMPARED,
    ),
    "data_parallel": (1, ["strategy=data_parallel", "model=mlp"], {}),
    "data_parallel, bf16": (1, ["strategy=data_parallel", "trainer.precision=bf16", "model=mlp"], {}),
    "async_parameter_server": (2, ["strategy=async_parameter_server"], COMPARED),
    "gloo beside GPUs": (2, ["backend.name=gloo", "sync_bn=off"], {}),
}


def command(folder: Path, *words: str, backend: str = "nccl") -> Any:
    return composed(f"run_dir={folder}", *BASE, f"backend.name={backend}", *words)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_training_on_gpus_is_that_of_the_cpu_and_the_host_waits_for_nothing(name: str, tmp_path: Path) -> None:
    ranks, words, waits = SCENARIOS[name]
    found = in_world(ranks, trained_on_gpus, command(tmp_path / "gpu", *words))
    assert [rank["error"] for rank in found] == [""] * ranks
    for rank in found if name != "async_parameter_server" else []:  # each of its ranks copies weights and gradients
        assert {place: times for place, times in rank["waits"].items() if times > waits.get(place, 0) + 0.1} == {}
    # Ranks of a pipeline send to each other; powersgd goes on in gloo's threads, which may still be busy at the end.
    if name not in ("pipeline", "gradient_sync=powersgd"):
        assert all(sorted(rank["collectives"]) == sorted(found[0]["collectives"]) for rank in found)
    for rank in found if "bf16" in name and "gradient_sync" not in name else []:  # on a CPU fp16 comes near bf16
        assert "bfloat16" in rank["products"]
        assert "float16" not in rank["products"]
    if name == "fsdp, bf16":
        gathered = [
            dtype for rank in found for call in rank["collectives"] if "gather" in call[0] for dtype, _ in call[1:]
        ]
        assert "bfloat16" in gathered
        assert "float32" not in gathered
    in_world(ranks, train, command(tmp_path / "cpu", *words, backend="gloo"))
    if name == "pipeline":  # no GPU gets the weights of another one
        moved = sum(rank["weights_moved"] for rank in found)
        assert 0 < moved <= 4 * len(weights(tmp_path / "cpu"))
    if name != "async_parameter_server":  # its steps come in any order
        # The parts of data_parallel, in bf16, are added up in another order than those of one CPU.
        limit = 1e-2 if name == "data_parallel, bf16" else 1e-6
        assert distance(weights(tmp_path / "cpu"), weights(tmp_path / "gpu")) < limit


def test_what_gpus_have_trained_is_resumed_evaluated_predicted_and_exported(tmp_path: Path) -> None:
    gpu, cpu, words = tmp_path / "gpu", tmp_path / "cpu", ["sync_bn=on", "trainer.ema=0.9"]
    for pause in ("1", "null"):
        found = in_world(2, trained_on_gpus, command(gpu, *words, f"trainer.pause_after={pause}"))
        assert [rank["error"] for rank in found] == ["", ""]
    in_world(2, train, command(cpu, *words, backend="gloo"))
    assert distance(weights(cpu), weights(gpu)) < 1e-6
    for mode in ("evaluate", "predict"):
        for folder, gpus, backend in ((gpu, GPUS, "nccl"), (cpu, 0, "gloo")):
            in_world(2, worked, command(folder, *words, f"mode={mode}", f"resume={folder}", backend=backend), gpus)
    of_gpu, of_cpu = (json.loads((folder / "evaluation.json").read_text())["metrics"] for folder in (gpu, cpu))
    assert of_gpu == pytest.approx(of_cpu, rel=1e-5)
    rows = [list(csv.reader((folder / "predictions.csv").open())) for folder in (gpu, cpu)]
    assert len(rows[0]) == len(rows[1]) > 300
    assert [row[:2] for row in rows[0]] == [row[:2] for row in rows[1]]
    in_world(1, worked, command(gpu, *words, "mode=export", f"resume={gpu}"), 1)
    program = torch.export.load(gpu / "last.pt2")  # in this process, which has no GPU
    assert {tensor.device.type for tensor in [*program.state_dict.values(), *program.constants.values()]} == {"cpu"}


def losses_of_pixels() -> list[float]:
    """The distance of a loss and of its gradient on a GPU from the CPU's, with deterministic kernels."""
    device.pretend(1, "nccl")
    task = instantiate_as(
        Task, composed("task=segmentation", "task.classes=3", "task.class_weights=[1,2,3]").task, "task"
    )
    outputs, targets = torch.randn(4, 3, 5, 5, requires_grad=True), torch.randint(3, (4, 5, 5))
    targets[0, 0] = 255
    expected, _ = task(outputs, targets)
    (slope,) = torch.autograd.grad(expected, outputs)
    torch.use_deterministic_algorithms(True)
    task.cross_entropy.to("cuda:0")
    on_gpu = outputs.detach().to("cuda:0").requires_grad_()
    loss, _ = task(on_gpu, targets.to("cuda:0"))
    loss.backward()
    return [abs(loss.item() - expected.item()), (on_gpu.grad.cpu() - slope).abs().max().item()]


def test_a_class_for_each_pixel_has_deterministic_kernels() -> None:
    assert in_world(1, losses_of_pixels) == [pytest.approx([0, 0], abs=1e-6)]


def place_of_data(free: int) -> str:
    """Where 1000 bytes of samples are on a GPU with so much free memory."""
    device.pretend(1, "nccl")
    torch.cuda.mem_get_info = lambda device=None: (free, free)  # type: ignore[assignment]
    data = InMemoryDataset(torch.zeros(1000, 1, dtype=torch.uint8), torch.zeros(1000, dtype=torch.int64))
    return data.to(torch.device("cuda:0")).samples.device.type


@pytest.mark.parametrize(("free", "place"), [(4000, "cuda"), (3999, "cpu")])
def test_data_stays_with_the_host_if_a_gpu_has_no_room(free: int, place: str) -> None:
    assert in_world(1, place_of_data, free) == [place]


def device_of_rank(gpus: list[int], of_each_task: bool) -> str:
    """Of backend=auto where rank r sees gpus[r] GPUs. of_each_task: they are its own, and Slurm says so."""
    mine = gpus[int(os.environ["RANK"])]
    if mine:
        device.pretend(mine, "gloo")
    if of_each_task:
        os.environ["SLURM_GPUS_PER_TASK"] = "1"
    with init_distributed("auto") as world:
        return str(world.device)


@pytest.mark.parametrize(
    ("gpus", "of_each_task", "devices"),
    [
        ([2, 2], False, ["cuda:0", "cuda:1"]),
        ([2, 0], False, ["cpu", "cpu"]),
        ([1, 1], True, ["cuda:0", "cuda:0"]),
        ([1, 1], False, ["cpu", "cpu"]),
    ],
)
def test_all_ranks_take_one_backend(gpus: list[int], of_each_task: bool, devices: list[str]) -> None:
    assert in_world(2, device_of_rank, gpus, of_each_task) == devices


def distance_of_parts_from_whole(samples: int) -> float:
    device.pretend(2, "nccl")
    inputs = {name: torch.rand(samples, size, device="cuda:0") for name, size in (("left", 3), ("right", 4))}
    net = UnevenDataParallel(TakesDict().to("cuda:0"), first_share=0.5)
    return (net(inputs) - net.module(inputs)).abs().max().item()


def test_data_parallel_cuts_several_inputs() -> None:
    assert in_world(1, distance_of_parts_from_whole, 7) == [pytest.approx(0, abs=1e-6)]


def refusal_beside_a_gpu() -> str:
    device.pretend(1, "gloo")
    try:
        check_options(composed("gradient_sync=powersgd", "backend=gloo"), EnvLauncher())
    except ConfigError as error:
        return str(error)
    return ""


def test_powersgd_over_gloo_is_refused_where_there_is_a_gpu() -> None:
    (refusal,) = in_world(1, refusal_beside_a_gpu)
    assert refusal.endswith("type backend=nccl, or gradient_sync=auto")
