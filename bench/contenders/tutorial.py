"""The tutorial's mnist.py: one process, torchvision's MNIST through a DataLoader, plain SGD.

python mnist.py
"""

from datetime import datetime

import course
import torch
import torchvision.transforms as transforms
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm


def main():
    args, record = course.arguments(), course.Record()
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    model = course.ConvNet().to(device)
    train_set = course.mnist(args, train=True, transform=transforms.ToTensor())
    train_loader = DataLoader(dataset=train_set, batch_size=args.batch, shuffle=True, pin_memory=True)
    eval_set = course.mnist(args, train=False, transform=transforms.ToTensor())
    eval_loader = DataLoader(dataset=eval_set, batch_size=args.batch, shuffle=True, pin_memory=True)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    start, step = datetime.now(), 0
    for epoch in range(args.epochs):
        record.start()
        model.train()
        progress_bar_train = tqdm(train_loader, desc=f"Epoch {epoch + 1}/{args.epochs} train")
        for image, label in progress_bar_train:
            image = image.to(device, non_blocking=True)
            label = label.to(device, non_blocking=True)
            outputs = model(image)
            loss = criterion(outputs, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                progress_bar_train.set_postfix(loss=loss.item())
            step += 1
            record.stepped()
        record.lap("training", len(train_set))

        with torch.no_grad():
            model.eval()
            preds, targets = [], []
            for image, label in tqdm(eval_loader, desc=f"Epoch {epoch + 1}/{args.epochs} eval"):
                image = image.to(device, non_blocking=True)
                label = label.to(device, non_blocking=True)
                preds.append(model(image).argmax(dim=1))
                targets.append(label)
            preds, targets = torch.cat(preds), torch.cat(targets)
            acc = (preds == targets).sum().cpu().numpy() / len(preds)
            print(f"Epoch {epoch + 1}/{args.epochs} acc: {acc:.4f}")
        record.lap("evaluation", len(eval_set))

    print("Training complete in: " + str(datetime.now() - start))
    torch.save(model.state_dict(), "mnist.pth")
    record.write(acc)


if __name__ == "__main__":
    main()
