"""`references.py` on a folder of JPEGs: workers decode each image in each epoch.

python references_images.py --data=pictures --size=32 --epochs=3 --batch=64
"""

import argparse

import torch
import workload
from record import Record
from references import WORKERS, evaluate, train_one_epoch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def folders(root: str, size: int) -> list[ImageFolder]:
    """The training and the test images, as references/classification/presets.py transforms them."""
    fit = [transforms.Resize(size), transforms.CenterCrop(size)]
    to_float = [
        transforms.PILToTensor(),
        transforms.ConvertImageDtype(torch.float),
        transforms.Normalize(MEAN, STD),
    ]
    train = transforms.Compose([*fit, transforms.RandomHorizontalFlip(), *to_float])
    return [ImageFolder(f"{root}/train", train), ImageFolder(f"{root}/test", transforms.Compose([*fit, *to_float]))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="folder with train/ and test/")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    args, record = parser.parse_args(), Record()
    sets = folders(args.data, args.size)
    model = workload.small_image_net([3, args.size, args.size], len(sets[0].classes))
    train_loader, test_loader = (
        DataLoader(data, batch_size=args.batch, shuffle=data is sets[0], num_workers=WORKERS, pin_memory=True)
        for data in sets
    )
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    acc = 0.0
    for _ in range(args.epochs):
        record.start()
        train_one_epoch(model, criterion, optimizer, train_loader, record)
        record.lap("training", len(sets[0]))
        acc = evaluate(model, criterion, test_loader)
        record.lap("evaluation", len(sets[1]))
    record.write(acc)


if __name__ == "__main__":
    main()
