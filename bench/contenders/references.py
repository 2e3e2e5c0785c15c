"""The loop of torchvision's references/classification: loss and accuracy are read every step, workers load the data.

python references.py
torchrun --standalone --nproc_per_node=2 references.py
"""

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

WORKERS = 2


class SmoothedValue:
    """A series of values: the median of a window, and the global average."""

    def __init__(self) -> None:
        self.deque: deque[float] = deque(maxlen=20)
        self.total, self.count = 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.deque.append(value)
        self.count += n
        self.total += value * n

    def __str__(self) -> str:
        return f"{torch.tensor(list(self.deque)).median().item():.4f} ({self.total / self.count:.4f})"


class MetricLogger:
    def __init__(self) -> None:
        self.meters: dict[str, SmoothedValue] = defaultdict(SmoothedValue)

    def log_every(self, iterable: Any, print_freq: int, header: str) -> Iterable[Any]:
        end = time.time()
        for i, obj in enumerate(iterable):
            self.meters["data"].update(time.time() - end)
            yield obj
            self.meters["time"].update(time.time() - end)
            if i % print_freq == 0:
                print(f"{header}  [{i}/{len(iterable)}]", *(f"{name}: {meter}" for name, meter in self.meters.items()))
            end = time.time()

    def count(self, loss: Tensor, output: Tensor, target: Tensor) -> None:
        with torch.inference_mode():
            _, pred = output.topk(5, 1, True, True)
            correct = pred.t().eq(target[None])
            accuracies = [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in (1, 5)]
        self.meters["loss"].update(loss.item())
        self.meters["acc1"].update(accuracies[0].item(), n=len(target))
        self.meters["acc5"].update(accuracies[1].item(), n=len(target))


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
        metrics.meters["lr"].update(optimizer.param_groups[0]["lr"])
        metrics.meters["img/s"].update(image.shape[0] / (time.time() - start_time))


def evaluate(model: nn.Module, criterion: nn.Module, loader: Any) -> float:
    model.eval()
    metrics = MetricLogger()
    with torch.inference_mode():
        for image, target in metrics.log_every(loader, 100, "Test:"):
            output = model(image)
            metrics.count(criterion(output, target), output, target)
    for meter in metrics.meters.values() if dist.is_initialized() else ():
        t = torch.tensor([meter.count, meter.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(t)
        meter.count, meter.total = int(t[0]), t[1].item()
    return metrics.meters["acc1"].total / metrics.meters["acc1"].count / 100


def main() -> None:
    args, record = workload.arguments(), Record()
    model = workload.wrap(workload.ConvNet())
    to_float = [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float)]
    sets = workload.mnist(args, *to_float, transforms.Normalize((0.1307,), (0.3081,)))
    if dist.is_initialized():
        samplers = [DistributedSampler(data, shuffle=data is sets[0]) for data in sets]
    else:
        samplers = [RandomSampler(sets[0]), SequentialSampler(sets[1])]
    train_loader, test_loader = (
        DataLoader(data, batch_size=args.batch, sampler=sampler, num_workers=WORKERS, pin_memory=True)
        for data, sampler in zip(sets, samplers, strict=True)
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
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
            parts = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
            torch.save({name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch}, "checkpoint.pth")
    record.write(acc)


if __name__ == "__main__":
    main()
