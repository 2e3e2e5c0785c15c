"""The loop of torchvision's references/classification: loss and accuracy are read every step, workers load the data.

python references.py
torchrun --standalone --nproc_per_node=2 references.py
"""

import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
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

    def synchronize_between_processes(self) -> None:
        if dist.is_initialized():
            t = torch.tensor([self.count, self.total], dtype=torch.float64)
            dist.barrier()
            dist.all_reduce(t)
            self.count, self.total = int(t[0]), t[1].item()

    def __str__(self) -> str:
        return f"{torch.tensor(list(self.deque)).median().item():.4f} ({self.total / self.count:.4f})"


class MetricLogger:
    def __init__(self) -> None:
        self.meters: dict[str, SmoothedValue] = defaultdict(SmoothedValue)

    def __str__(self) -> str:
        return "  ".join(f"{name}: {meter}" for name, meter in self.meters.items())

    def log_every(self, iterable: Any, print_freq: int, header: str) -> Iterable[Any]:
        end = time.time()
        for i, obj in enumerate(iterable):
            self.meters["data"].update(time.time() - end)
            yield obj
            self.meters["time"].update(time.time() - end)
            if i % print_freq == 0:
                print(f"{header}  [{i}/{len(iterable)}]  {self}")
            end = time.time()


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[Tensor]:
    with torch.inference_mode():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in topk]


def count(metrics: MetricLogger, loss: Tensor, output: Tensor, target: Tensor) -> None:
    acc1, acc5 = accuracy(output, target, topk=(1, 5))
    metrics.meters["loss"].update(loss.item())
    metrics.meters["acc1"].update(acc1.item(), n=len(target))
    metrics.meters["acc5"].update(acc5.item(), n=len(target))


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
        count(metrics, loss, output, target)
        metrics.meters["lr"].update(optimizer.param_groups[0]["lr"])
        metrics.meters["img/s"].update(image.shape[0] / (time.time() - start_time))


def evaluate(model: nn.Module, criterion: nn.Module, loader: Any) -> float:
    model.eval()
    metrics = MetricLogger()
    with torch.inference_mode():
        for image, target in metrics.log_every(loader, 100, "Test:"):
            output = model(image)
            count(metrics, criterion(output, target), output, target)
    for meter in metrics.meters.values():
        meter.synchronize_between_processes()
    print(f"Test: {metrics}")
    return metrics.meters["acc1"].total / metrics.meters["acc1"].count / 100


def loaders(args: Any, distributed: bool) -> Iterator[Any]:
    to_float = [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float)]
    preset = transforms.Compose([*to_float, transforms.Normalize((0.1307,), (0.3081,))])
    for train, alone in ((True, RandomSampler), (False, SequentialSampler)):
        dataset = workload.mnist(args, train=train, transform=preset)
        sampler = DistributedSampler(dataset, shuffle=train) if distributed else alone(dataset)
        yield DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=WORKERS, pin_memory=True)


def main() -> None:
    args, record = workload.arguments(), Record()
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        dist.init_process_group(backend="gloo", init_method="env://")
    train_loader, test_loader = loaders(args, distributed)
    model: nn.Module = workload.ConvNet()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    trained = nn.parallel.DistributedDataParallel(model) if distributed else model
    for epoch in range(args.epochs):
        record.start()
        if distributed:
            train_loader.sampler.set_epoch(epoch)
        train_one_epoch(trained, criterion, optimizer, train_loader, record)
        scheduler.step()
        record.lap("training", len(train_loader.dataset))
        acc = evaluate(trained, criterion, test_loader)
        record.lap("evaluation", len(test_loader.dataset))
        if int(os.environ.get("RANK", 0)) == 0:
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(checkpoint | {"lr_scheduler": scheduler.state_dict()}, "checkpoint.pth")
    record.write(acc)


if __name__ == "__main__":
    main()
