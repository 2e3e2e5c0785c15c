"""The tutorial's ddp_mnist.py, over gloo on CPUs; its SyncBatchNorm, which refuses CPU tensors, is left out.

torchrun --standalone --nproc_per_node=2 ddp_mnist.py
"""

import os
from datetime import datetime

import course
import torch
import torch.distributed as dist
import torchvision.transforms as transforms
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm


@torch.no_grad()
def concat_all_gather(tensor):
    tensors_gather = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors_gather, tensor, async_op=False)
    return torch.cat(tensors_gather, dim=0)


def main():
    args, record = course.arguments(), course.Record()
    local_rank, rank, world_size = (int(os.environ[name]) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))
    dist.init_process_group(backend="gloo", init_method="env://", world_size=world_size, rank=rank)
    device = torch.device("cpu")
    print(f"pid: {os.getpid()}, ppid: {os.getppid()}, rank: {local_rank}-{rank}")

    model = nn.parallel.DistributedDataParallel(course.ConvNet().to(device))
    train_set = course.mnist(args, train=True, transform=transforms.ToTensor())
    train_sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)
    train_loader = DataLoader(train_set, batch_size=args.batch, shuffle=False, sampler=train_sampler)
    eval_set = course.mnist(args, train=False, transform=transforms.ToTensor())
    eval_sampler = DistributedSampler(eval_set, num_replicas=world_size, rank=rank)
    eval_loader = DataLoader(eval_set, batch_size=args.batch, shuffle=False, sampler=eval_sampler)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    start, step = datetime.now(), 0
    for epoch in range(args.epochs):
        record.start()
        train_sampler.set_epoch(epoch)
        eval_sampler.set_epoch(epoch)
        model.train()
        progress_bar_train = tqdm(train_loader, desc=f"Epoch {epoch + 1}/{args.epochs} train") if local_rank == 0 else train_loader
        for image, label in progress_bar_train:
            image = image.to(device, non_blocking=True)
            label = label.to(device, non_blocking=True)
            outputs = model(image)
            loss = criterion(outputs, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if local_rank == 0 and step % 10 == 0:
                progress_bar_train.set_postfix(loss=loss.item())
            step += 1
            record.stepped()
        record.lap("training", len(train_set))

        with torch.no_grad():
            model.eval()
            preds, targets = [], []
            for image, label in tqdm(eval_loader, desc=f"Epoch {epoch + 1}/{args.epochs} eval") if local_rank == 0 else eval_loader:
                image = image.to(device, non_blocking=True)
                label = label.to(device, non_blocking=True)
                pred = model(image).argmax(dim=1)
                preds.append(concat_all_gather(pred))
                targets.append(concat_all_gather(label))
            if local_rank == 0:
                preds, targets = torch.cat(preds), torch.cat(targets)
                acc = (preds == targets).sum().cpu().numpy() / len(preds)
                print(f"Epoch {epoch + 1}/{args.epochs} acc: {acc:.5f}")
        record.lap("evaluation", len(eval_set))

    if local_rank == 0:
        print("Training complete in: " + str(datetime.now() - start))
    if rank == 0:
        torch.save(model.module.state_dict(), "mnist.pth")
    record.write(acc if local_rank == 0 else None)


if __name__ == "__main__":
    main()
