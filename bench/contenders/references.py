"""The loop of torchvision's references/classification: loss and accuracy are read every step, workers load the data."""

import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import workload
from record import Record
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18


class MetricLogger:
    """Of each value the median of the last 20, and the sum and count of all."""

    def __init__(self) -> None:
        self.last: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=20))
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])

    def update(self, name: str, value: float, n: int = 1) -> None:
        self.last[name].append(value)
        self.sums[name][0] += value * n
        self.sums[name][1] += n

    def log_every(self, iterable: Any, print_freq: int, header: str) -> Iterable[Any]:
        end = time.time()
        for i, obj in enumerate(iterable):
            self.update("data", time.time() - end)
            yield obj
            self.update("time", time.time() - end)
            if i % print_freq == 0:
                medians = {name: torch.tensor(list(values)).median().item() for name, values in self.last.items()}
                means = (f"{name}: {medians[name]:.4f} ({total / n:.4f})" for name, (total, n) in self.sums.items())
                print(f"{header}  [{i}/{len(iterable)}]", *means)
            end = time.time()

    def count(self, loss: Tensor, output: Tensor, target: Tensor) -> None:
        with torch.inference_mode():
            _, pred = output.topk(5, 1, True, True)
            correct = pred.t().eq(target[None])
            accuracies = [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in (1, 5)]
        self.update("loss", loss.item())
        self.update("acc1", accuracies[0].item(), n=len(target))
        self.update("acc5", accuracies[1].item(), n=len(target))


def train_one_epoch(model: nn.Module, criterion: nn.Module, optimizer: Any, loader: Any, record: Record) -> None:
    model.train()
    metrics = MetricLogger()
    for image, target in metrics.log_every(loader, 10, "Epoch:"):
        start_time = time.time()
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record.stepped()
        metrics.count(loss, output, target)
        metrics.update("lr", optimizer.param_groups[0]["lr"])
        metrics.update("img/s", image.shape[0] / (time.time() - start_time))


def evaluate(model: nn.Module, criterion: nn.Module, loader: Any) -> float:
    model.eval()
    metrics = MetricLogger()
    with torch.inference_mode():
        for image, target in metrics.log_every(loader, 100, "Test:"):
            output = model(image)
            metrics.count(criterion(output, target), output, target)
    for name in metrics.sums if dist.is_initialized() else ():
        t = torch.tensor(metrics.sums[name], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(t)
        metrics.sums[name] = t.tolist()
    total, count = metrics.sums["acc1"]
    return total / count / 100


args, record = workload.arguments(), Record()
to_float = [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float)]
if args.images:  # as references/classification/presets.py transforms them
    to_float.append(transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    whole = [transforms.Resize(args.size), transforms.CenterCrop(args.size)]
    # Random crops, as there; or the whole image, as most of a short training sees it.
    of_train = [transforms.RandomResizedCrop(args.size)] if args.resnet18 else whole
    steps = {"train": [*of_train, transforms.RandomHorizontalFlip(), *to_float], "test": [*whole, *to_float]}
    sets = [ImageFolder(f"{args.images}/{split}", transforms.Compose(own)) for split, own in steps.items()]
    shape, classes = [3, args.size, args.size], len(sets[0].classes)
    model = resnet18(num_classes=classes) if args.resnet18 else workload.small_image_net(shape, classes)
else:
    sets = workload.mnist(args, *to_float, transforms.Normalize((0.1307,), (0.3081,)))
    model = workload.wrap(workload.ConvNet())
samplers: list[Any] = [RandomSampler(sets[0]), SequentialSampler(sets[1])]
if dist.is_initialized():
    samplers = [DistributedSampler(data, shuffle=data is sets[0]) for data in sets]
train_loader, test_loader = (
    DataLoader(data, batch_size=args.batch, sampler=sampler, num_workers=2, pin_memory=True)
    for data, sampler in zip(sets, samplers, strict=True)
)
# 0.1 is for 8 processes of 32 images there; 90 epochs with a step after each 30.
rate, step = (0.1 * args.batch / 256, max(1, args.epochs // 3)) if args.resnet18 else (0.1, 30)
criterion = nn.CrossEntropyLoss(label_smoothing=0.0)
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=step, gamma=0.1)
for epoch in range(args.epochs):
    record.start()
    if dist.is_initialized():
        samplers[0].set_epoch(epoch)
    train_one_epoch(model, criterion, optimizer, train_loader, record)
    scheduler.step()
    record.lap("training", len(sets[0]))
    acc = evaluate(model, criterion, test_loader)
    record.lap("evaluation", len(sets[1]))
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"test accuracy {acc:.4f}", flush=True)
        parts = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch}, "checkpoint.pth")
    if acc >= args.until:
        break
record.write(acc)
