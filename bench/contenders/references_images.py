"""`references.py` on a folder of JPEGs: workers decode each image in each epoch.

python references_images.py --data=pictures --size=32 --epochs=3 --batch=64
python references_images.py --data=pictures --size=32 --epochs=30 --batch=32 --resnet18 --until=0.6
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
from torchvision.models import resnet18

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def folders(root: str, size: int, crops: bool) -> list[ImageFolder]:
    """The training and the test images, as references/classification/presets.py transforms them.

    crops: random ones of the training images, as there; else the whole image, as most of a short training sees it.
    """
    fit = [transforms.Resize(size), transforms.CenterCrop(size)]
    to_float = [
        transforms.PILToTensor(),
        transforms.ConvertImageDtype(torch.float),
        transforms.Normalize(MEAN, STD),
    ]
    of_train = [transforms.RandomResizedCrop(size)] if crops else fit
    train = transforms.Compose([*of_train, transforms.RandomHorizontalFlip(), *to_float])
    return [ImageFolder(f"{root}/train", train), ImageFolder(f"{root}/test", transforms.Compose([*fit, *to_float]))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="folder with train/ and test/")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--resnet18", action="store_true", help="with the recipe that it was published with")
    parser.add_argument("--until", type=float, default=1.0, help="test accuracy at which to end")
    args, record = parser.parse_args(), Record()
    sets = folders(args.data, args.size, args.resnet18)
    classes, shape = len(sets[0].classes), [3, args.size, args.size]
    model = resnet18(num_classes=classes) if args.resnet18 else workload.small_image_net(shape, classes)
    train_loader, test_loader = (
        DataLoader(data, batch_size=args.batch, shuffle=data is sets[0], num_workers=WORKERS, pin_memory=True)
        for data in sets
    )
    # 0.1 there is for 8 processes of 32 images; 90 epochs with a step after each 30
    rate, decay, gamma = (0.1 * args.batch / 256, 1e-4, 0.1) if args.resnet18 else (0.1, 0.0, 1.0)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=max(1, args.epochs // 3), gamma=gamma)
    acc = 0.0
    for _ in range(args.epochs):
        record.start()
        train_one_epoch(model, criterion, optimizer, train_loader, record)
        record.lap("training", len(sets[0]))
        acc = evaluate(model, criterion, test_loader)
        record.lap("evaluation", len(sets[1]))
        print(f"test accuracy {acc:.4f}", flush=True)
        if acc >= args.until:
            break
        scheduler.step()
    record.write(acc)


if __name__ == "__main__":
    main()
