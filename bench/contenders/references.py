"""The loop of torchvision's references/classification: a MetricLogger that reads loss and accuracy every step, worker processes.

python references.py
torchrun --standalone --nproc_per_node=2 references.py
"""

import datetime
import os
import time
from collections import defaultdict, deque

import course
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms

WORKERS = 2


class SmoothedValue:
    """A series of values, smoothed over a window, and its global average."""

    def __init__(self, window_size=20, fmt="{median:.4f} ({global_avg:.4f})"):
        self.deque, self.total, self.count, self.fmt = deque(maxlen=window_size), 0.0, 0, fmt

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    def synchronize_between_processes(self):
        if dist.is_initialized():
            t = torch.tensor([self.count, self.total], dtype=torch.float64)
            dist.barrier()
            dist.all_reduce(t)
            self.count, self.total = int(t[0]), t[1].item()

    @property
    def global_avg(self):
        return self.total / self.count

    def __str__(self):
        d = torch.tensor(list(self.deque), dtype=torch.float32)
        return self.fmt.format(median=d.median().item(), avg=d.mean().item(), global_avg=self.global_avg, max=d.max().item(), value=self.deque[-1])


class MetricLogger:
    def __init__(self, delimiter="\t"):
        self.meters, self.delimiter = defaultdict(SmoothedValue), delimiter

    def update(self, **kwargs):
        for k, v in kwargs.items():
            self.meters[k].update(v.item() if isinstance(v, torch.Tensor) else v)

    def synchronize_between_processes(self):
        for meter in self.meters.values():
            meter.synchronize_between_processes()

    def __str__(self):
        return self.delimiter.join(f"{name}: {meter}" for name, meter in self.meters.items())

    def log_every(self, iterable, print_freq, header):
        start_time = end = time.time()
        iter_time, data_time = SmoothedValue(fmt="{avg:.4f}"), SmoothedValue(fmt="{avg:.4f}")
        for i, obj in enumerate(iterable):
            data_time.update(time.time() - end)
            yield obj
            iter_time.update(time.time() - end)
            if i % print_freq == 0:
                eta = datetime.timedelta(seconds=int(iter_time.global_avg * (len(iterable) - i)))
                print(self.delimiter.join([header, f"[{i}/{len(iterable)}]", f"eta: {eta}", str(self), f"time: {iter_time}", f"data: {data_time}"]))
            end = time.time()
        print(f"{header} Total time: {datetime.timedelta(seconds=int(time.time() - start_time))}")


def accuracy(output, target, topk):
    with torch.inference_mode():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in topk]


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, record):
    model.train()
    metric_logger = MetricLogger(delimiter="  ")
    metric_logger.meters["lr"] = SmoothedValue(window_size=1, fmt="{value}")
    metric_logger.meters["img/s"] = SmoothedValue(window_size=10, fmt="{value}")
    for image, target in metric_logger.log_every(data_loader, 10, f"Epoch: [{epoch}]"):
        start_time = time.time()
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record.stepped()
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        metric_logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        metric_logger.meters["acc1"].update(acc1.item(), n=image.shape[0])
        metric_logger.meters["acc5"].update(acc5.item(), n=image.shape[0])
        metric_logger.meters["img/s"].update(image.shape[0] / (time.time() - start_time))


def evaluate(model, criterion, data_loader, device):
    model.eval()
    metric_logger = MetricLogger(delimiter="  ")
    with torch.inference_mode():
        for image, target in metric_logger.log_every(data_loader, 100, "Test:"):
            image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
            output = model(image)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            metric_logger.update(loss=loss.item())
            metric_logger.meters["acc1"].update(acc1.item(), n=image.shape[0])
            metric_logger.meters["acc5"].update(acc5.item(), n=image.shape[0])
    metric_logger.synchronize_between_processes()
    print(f"Test: Acc@1 {metric_logger.meters['acc1'].global_avg:.3f} Acc@5 {metric_logger.meters['acc5'].global_avg:.3f}")
    return metric_logger.meters["acc1"].global_avg / 100


def main():
    args, record = course.arguments(), course.Record()
    distributed, device = "WORLD_SIZE" in os.environ, torch.device("cpu")
    if distributed:
        dist.init_process_group(backend="gloo", init_method="env://")
        dist.barrier()
    preset = transforms.Compose([transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float), transforms.Normalize((0.1307,), (0.3081,))])
    dataset, dataset_test = course.mnist(args, train=True, transform=preset), course.mnist(args, train=False, transform=preset)
    train_sampler = DistributedSampler(dataset) if distributed else RandomSampler(dataset)
    test_sampler = DistributedSampler(dataset_test, shuffle=False) if distributed else SequentialSampler(dataset_test)
    data_loader = DataLoader(dataset, batch_size=args.batch, sampler=train_sampler, num_workers=WORKERS, pin_memory=True)
    data_loader_test = DataLoader(dataset_test, batch_size=args.batch, sampler=test_sampler, num_workers=WORKERS, pin_memory=True)

    model = course.ConvNet().to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    model_without_ddp = model
    if distributed:
        model = nn.parallel.DistributedDataParallel(model)
        model_without_ddp = model.module

    for epoch in range(args.epochs):
        record.start()
        if distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, record)
        lr_scheduler.step()
        record.lap("training", len(dataset))
        acc = evaluate(model, criterion, data_loader_test, device)
        record.lap("evaluation", len(dataset_test))
        if int(os.environ.get("RANK", 0)) == 0:
            checkpoint = {"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(checkpoint | {"lr_scheduler": lr_scheduler.state_dict()}, "checkpoint.pth")
    record.write(acc)


if __name__ == "__main__":
    main()
