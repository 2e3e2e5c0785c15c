"""A Lightning Trainer with its defaults: logger, checkpoints, progress bar, a validation an epoch.

python lightning_mnist.py --devices=2
"""

import lightning
import torch
import workload
from record import Record
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Accuracy


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.criterion = workload.ConvNet(), nn.CrossEntropyLoss()
        self.accuracy = Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch, _):
        image, label = batch
        loss = self.criterion(self.model(image), label)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        image, label = batch
        logits = self.model(image)
        self.accuracy.update(logits.argmax(dim=1), label)
        self.log("val_loss", self.criterion(logits, label), prog_bar=True, sync_dist=True)
        self.log("val_acc", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-4)


class Clock(lightning.Callback):
    def __init__(self, args, record):
        self.args, self.record = args, record
        self.on_train_batch_end = record.stepped

    def on_train_epoch_start(self, *_):
        self.record.start()

    def on_validation_start(self, trainer, _):
        if not trainer.sanity_checking:
            self.record.lap("training", self.args.samples)

    def on_validation_end(self, trainer, _):
        if not trainer.sanity_checking:
            self.record.lap("evaluation", self.args.test_samples)


def main() -> None:
    args, record = workload.arguments(), Record()
    train_set, eval_set = workload.mnist(args)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=args.devices, strategy="ddp" if args.devices > 1 else "auto", max_epochs=args.epochs,
        callbacks=[Clock(args, record)],
    )  # fmt: skip
    trainer.fit(
        Classifier(),
        DataLoader(train_set, batch_size=args.batch, shuffle=True),
        DataLoader(eval_set, batch_size=args.batch),
    )
    record.write(trainer.callback_metrics["val_acc"].item(), rank=trainer.global_rank)


if __name__ == "__main__":
    main()
