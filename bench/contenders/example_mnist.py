"""pytorch/examples/mnist/main.py on a CPU, which ends as soon as its test accuracy is high enough."""

import torch
import torch.nn.functional as F
import workload
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms

args = workload.arguments()
sets = workload.mnist(args, transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,)))
torch.manual_seed(1)
train_loader, test_loader = DataLoader(sets[0], args.batch, shuffle=True), DataLoader(sets[1], 1000, shuffle=True)
layers = [nn.Conv2d(1, 32, 3, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
layers += [nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1)]
model = nn.Sequential(*layers)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(1, args.epochs + 1):
    model.train()
    for step, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"Train Epoch: {epoch} [{step * len(data)}] Loss: {loss.item():.6f}")
    model.eval()
    correct = 0
    for data, target in test_loader:
        with torch.no_grad():
            correct += int(model(data).argmax(dim=1).eq(target).sum())
    accuracy = correct / len(sets[1])
    print(f"test accuracy {accuracy:.4f}", flush=True)
    if accuracy >= args.until:
        break
    scheduler.step()
