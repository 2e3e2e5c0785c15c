"""pytorch/examples/mnist/main.py on a CPU, which ends as soon as its test accuracy is high enough.

python example_mnist.py --epochs=14 --until=0.99
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def train(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    model.train()
    for step, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"Train Epoch: {epoch} [{step * len(data)}] Loss: {loss.item():.6f}")


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    correct = 0
    for data, target in loader:
        correct += int(model(data).argmax(dim=1).eq(target).sum())
    return correct / len(loader.dataset)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=os.environ.get("LOCKSTEP_DATA", "data"), help="where MNIST/raw lies")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--samples", type=int, default=60000)
    parser.add_argument("--until", type=float, default=1.0, help="test accuracy at which to end")
    args = parser.parse_args()
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    sets = [datasets.MNIST(args.data, train=train, transform=transform) for train in (True, False)]
    sets[0].data, sets[0].targets = sets[0].data[: args.samples], sets[0].targets[: args.samples]
    torch.manual_seed(1)
    train_loader, test_loader = DataLoader(sets[0], 64, shuffle=True), DataLoader(sets[1], 1000, shuffle=True)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(model, train_loader, optimizer, epoch)
        accuracy = test(model, test_loader)
        print(f"test accuracy {accuracy:.4f}", flush=True)
        if accuracy >= args.until:
            break
        scheduler.step()


if __name__ == "__main__":
    main()
