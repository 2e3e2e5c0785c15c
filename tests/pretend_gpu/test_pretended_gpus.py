"""Trainings on pretended GPUs: they run with all tensors of a computation on one device, the host waits for none, the
ranks call the same collectives, and the weights are those of the CPU."""

import csv
import json
from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from lockstep.data import Tensors
from lockstep.data.loader import Progress
from lockstep.distributed.world import join_world
from lockstep.strategies.one_process import UnevenDataParallel
from lockstep.tasks.tasks import CrossEntropy
from pretend_gpu import device
from pretend_gpu.scenarios import GPUS, MPS, SCENARIOS, small_training, trained_on_gpus, worked
from support.commands import ema
from support.worlds import distance, in_world, train, train_all, weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{scenario: what each rank has seen, and the run folders of the GPUs and the CPU}. A world of each number of ranks
    trains all of them, but for the one over gloo."""
    parent, worlds = tmp_path_factory.mktemp("trained"), defaultdict(list)
    for name, (ranks, words, _) in SCENARIOS.items():
        worlds[ranks, "backend.name=gloo" in words].append(name)
    found = {}
    for (ranks, _), names in worlds.items():
        numbers = [list(SCENARIOS).index(name) for name in names]
        gpu, cpu = ([parent / f"{number}-{kind}" for number in numbers] for kind in ("gpu", "cpu"))
        words = [SCENARIOS[name][1] for name in names]
        on_gpus = [small_training(at, *each) for at, each in zip(gpu, words, strict=True)]
        seen = zip(*in_world(ranks, trained_on_gpus, on_gpus, limit=1500), strict=True)
        on_cpu = [small_training(at, *each, backend="gloo") for at, each in zip(cpu, words, strict=True)]
        in_world(ranks, train_all, on_cpu, limit=1500)
        found |= {name: each for name, *each in zip(names, map(list, seen), gpu, cpu, strict=True)}
    return found


@pytest.mark.timeout(1800)  # of the first one, which trains them all
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_training_on_gpus_is_that_of_the_cpu_and_the_host_waits_for_nothing(trained, name):
    (ranks, _, waits), (found, gpu, cpu) = SCENARIOS[name], trained[name]
    assert [rank["error"] for rank in found] == [""] * ranks
    for rank in found if name != "async_parameter_server" else []:  # each of its ranks copies weights and gradients
        assert {place: times for place, times in rank["waits"].items() if times > waits.get(place, 0) + 0.1} == {}
    if name not in ("pipeline", "gradient_sync=powersgd"):  # ranks of a pipeline send to each other
        assert all(sorted(rank["collectives"]) == sorted(found[0]["collectives"]) for rank in found)
    for rank in found if "bf16" in name and "gradient_sync" not in name else []:  # on a CPU fp16 comes near bf16
        assert "bfloat16" in rank["products"]
        assert "float16" not in rank["products"]
    if name == "fsdp, bf16":
        calls = [call for rank in found for call in rank["collectives"] if "gather" in call[0]]
        assert {dtype for call in calls for dtype, _ in call[1:]} & {"bfloat16", "float32"} == {"bfloat16"}
    if name == "pipeline":  # no GPU gets the weights of another one
        assert 0 < sum(rank["weights_moved"] for rank in found) <= 4 * len(weights(cpu))
    if name != "async_parameter_server":  # its steps come in any order
        # bf16: the parts of data_parallel are added up in another order, and fused batch norms round elsewhere.
        rounds = name in ("data_parallel, bf16", "sync_bn, bf16, a share without samples")
        assert distance(weights(cpu), weights(gpu)) < (1e-2 if rounds else 1e-6)


def test_what_gpus_have_trained_is_resumed_evaluated_predicted_and_exported(tmp_path):
    gpu, cpu, words = tmp_path / "gpu", tmp_path / "cpu", ["sync_bn=on", ema(0.9)]
    for pause in ("1", "null"):
        found = in_world(2, trained_on_gpus, [small_training(gpu, *words, f"trainer.pause_after={pause}")])
        assert [rank["error"] for (rank,) in found] == ["", ""]
    in_world(2, train, small_training(cpu, *words, backend="gloo"))
    assert distance(weights(cpu), weights(gpu)) < 1e-6
    for mode, (folder, gpus, backend) in product(("evaluate", "predict"), ((gpu, GPUS, "nccl"), (cpu, 0, "gloo"))):
        use = [*words, f"mode={mode}", f"resume={folder}"]
        in_world(2, worked, small_training(folder, *use, backend=backend), gpus)
    of_gpu, of_cpu = (json.loads((folder / "evaluation.json").read_text())["metrics"] for folder in (gpu, cpu))
    assert of_gpu == pytest.approx(of_cpu, rel=1e-5)
    rows = [list(csv.reader((folder / "predictions.csv").open())) for folder in (gpu, cpu)]
    assert len(rows[0]) == len(rows[1]) > 300
    assert [row[:2] for row in rows[0]] == [row[:2] for row in rows[1]]
    in_world(1, worked, small_training(gpu, *words, "mode=export", f"resume={gpu}"), 1)
    program = torch.export.load(gpu / "last.pt2")  # in this process, which has no GPU
    assert {tensor.device.type for tensor in [*program.state_dict.values(), *program.constants.values()]} == {"cpu"}


def test_trainings_on_apples_gpu_have_the_weights_of_the_cpu_and_go_on_and_are_evaluated_there(tmp_path):
    def trainings(place, backend, *more):
        words = ["logger=[tensorboard]", "logging.every=2", *more]
        return [small_training(tmp_path / place / name, *MPS[name], *words, backend=backend) for name in MPS]

    in_world(1, train_all, trainings("cpu", "gloo", "trainer.channels_last=false"), limit=600)  # as on that GPU
    (found,) = in_world(1, trained_on_gpus, trainings("mps", "auto"), 1, "mps", limit=600)
    for name, run in zip(MPS, found, strict=True):
        assert (run["error"], run["weights_moved"] > 0) == ("", True), name
        apart = distance(weights(tmp_path / "cpu" / name), weights(tmp_path / "mps" / name))
        assert apart < (1e-2 if "bf16" in name else 1e-5), name
    moved, typed = tmp_path / "moved", [*MPS["mixup"], "trainer.channels_last=false"]
    paused, evaluated = ["trainer.pause_after=1"], ["mode=evaluate", f"resume={moved}"]
    (found,) = in_world(1, trained_on_gpus, [small_training(moved, *typed, *paused, backend="auto")], 1, "mps")
    assert found[0]["error"] == ""
    in_world(1, worked, small_training(moved, *typed, *evaluated, backend="auto"), 1, "mps")
    in_world(2, train_all, [small_training(moved, *typed, backend="gloo")])
    assert distance(weights(tmp_path / "cpu" / "mixup"), weights(moved)) < 1e-5


def losses_of_pixels():
    """The distance of a loss and of its gradient on a GPU from the CPU's, with deterministic kernels."""
    device.pretend(1, "nccl")
    task = CrossEntropy(class_weights=[1, 2, 3])
    outputs, targets = torch.randn(4, 3, 5, 5, requires_grad=True), torch.randint(3, (4, 5, 5))
    targets[0, 0] = -100
    expected = task.sums(outputs, targets).loss
    (slope,) = torch.autograd.grad(expected, outputs)
    torch.use_deterministic_algorithms(True)
    task.start(SimpleNamespace(device=torch.device("cuda:0")), Progress(), torch.float32)
    on_gpu = outputs.detach().to("cuda:0").requires_grad_()
    loss = task.sums(on_gpu, targets.to("cuda:0")).loss
    loss.backward()
    return [abs(loss.item() - expected.item()), (on_gpu.grad.cpu() - slope).abs().max().item()]


def test_a_class_for_each_pixel_has_deterministic_kernels():
    assert in_world(1, losses_of_pixels) == [pytest.approx([0, 0], abs=1e-6)]


def places_of_data():
    """Where 1000 bytes of samples, and 8000 of their targets, are on a GPU with just room, and with a byte less."""
    device.pretend(1, "nccl")
    data, found = Tensors(torch.zeros(1000, 1, dtype=torch.uint8), torch.zeros(1000, dtype=torch.int64)), []
    for free in (36000, 35999):
        torch.cuda.mem_get_info = lambda device=None, free=free: (free, free)
        found.append(data.to(torch.device("cuda:0")).inputs.device.type)
    return found


def test_data_stays_with_the_host_if_a_gpu_has_no_room():
    assert in_world(1, places_of_data) == [["cuda", "cpu"]]


def device_of(backend, gpus, of):
    """Of this rank; of backend=nccl the one that it is started on at once."""
    device.pretend(gpus, "nccl" if backend == "nccl" else "gloo", of)
    with join_world(backend) as world:
        world.barrier()  # the other one may still connect
        return str(device.seen.bound if backend == "nccl" else world.device)


def test_each_rank_takes_a_device_of_its_own():
    for backend, gpus, of, devices in (
        ("auto", 2, "cuda", ["cuda:0", "cuda:1"]),
        ("auto", 1, "cuda", ["cuda:0", "cuda:0"]),  # where a starter may show each rank one alone, it is that one
        ("nccl", 2, "cuda", ["None"]),  # a rank that is alone may never need it
        ("nccl", 2, "cuda", ["cuda:0", "cuda:1"]),
        ("auto", 1, "mps", ["mps:0"]),
        ("auto", 1, "mps", ["cpu", "cpu"]),  # it is for one process
    ):
        assert in_world(len(devices), device_of, backend, gpus, of) == devices


class TakesDict(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(3, 2), torch.nn.Linear(4, 2)

    def forward(self, inputs):
        out = self.left(inputs["left"]) + self.right(inputs["right"])
        return out


def distance_of_parts_from_whole(samples):
    device.pretend(2, "nccl")
    inputs = {name: torch.rand(samples, size, device="cuda:0") for name, size in (("left", 3), ("right", 4))}
    net = UnevenDataParallel(TakesDict().to("cuda:0"), first_share=0.5)
    distance = (net(inputs) - net.module(inputs)).abs().max().item()
    return distance


def test_data_parallel_cuts_several_inputs():
    assert in_world(1, distance_of_parts_from_whole, 7) == [pytest.approx(0, abs=1e-6)]
