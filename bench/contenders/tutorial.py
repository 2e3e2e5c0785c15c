"""The tutorial's mnist.py, and under torchrun its ddp_mnist.py over gloo, without SyncBatchNorm: it needs a GPU."""

import os
from typing import Any

import torch
import torch.distributed as dist
import workload
from record import Record
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

DEVICE = torch.device("cpu")
IS_FIRST = os.environ.get("LOCAL_RANK", "0") == "0"


@torch.no_grad()
def concat_all_gather(tensor: Tensor) -> Tensor:
    tensors_gather = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors_gather, tensor, async_op=False)
    return torch.cat(tensors_gather, dim=0)


def train_one_epoch(model: nn.Module, loader: Any, criterion: nn.Module, optimizer: Any, record: Record) -> None:
    model.train()
    progress = tqdm(loader, desc="train") if IS_FIRST else loader
    for step, (image, label) in enumerate(progress):
        image, label = image.to(DEVICE, non_blocking=True), label.to(DEVICE, non_blocking=True)
        loss = criterion(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if IS_FIRST and step % 10 == 0:
            progress.set_postfix(loss=loss.item())
        record.stepped()


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any) -> float:
    model.eval()
    preds, targets = [], []
    for image, label in tqdm(loader, desc="eval") if IS_FIRST else loader:
        image, label = image.to(DEVICE, non_blocking=True), label.to(DEVICE, non_blocking=True)
        pred = model(image).argmax(dim=1)
        preds.append(concat_all_gather(pred) if dist.is_initialized() else pred)
        targets.append(concat_all_gather(label) if dist.is_initialized() else label)
    all_preds, all_targets = torch.cat(preds), torch.cat(targets)
    return float((all_preds == all_targets).sum().cpu().numpy() / len(all_preds))


args, record = workload.arguments(), Record()
model = workload.wrap(workload.ConvNet().to(DEVICE))
sets = workload.mnist(args)
samplers = [DistributedSampler(data) for data in sets] if dist.is_initialized() else []
options = [{"sampler": sampler} for sampler in samplers] or [{"shuffle": True, "pin_memory": True}] * 2
loaders = [DataLoader(data, batch_size=args.batch, **how) for data, how in zip(sets, options, strict=True)]
criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 1e-4)
for epoch in range(args.epochs):
    record.start()
    for sampler in samplers:
        sampler.set_epoch(epoch)
    train_one_epoch(model, loaders[0], criterion, optimizer, record)
    record.lap("training", len(sets[0]))
    accuracy = evaluate(model, loaders[1])
    if IS_FIRST:
        print(f"Epoch {epoch + 1}/{args.epochs} acc: {accuracy:.5f}")
    record.lap("evaluation", len(sets[1]))
if IS_FIRST:
    torch.save(model.state_dict(), "mnist.pth")
record.write(accuracy)
