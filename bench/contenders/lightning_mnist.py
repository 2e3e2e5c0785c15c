"""A Lightning Trainer with its defaults: logger, checkpoints, progress bar, a validation an epoch."""

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


args, record = workload.arguments(), Record()
clock = lightning.pytorch.callbacks.LambdaCallback(
    on_train_epoch_start=lambda *_: record.start(),
    on_train_batch_end=record.stepped,
    on_validation_start=lambda trainer, _: trainer.sanity_checking or record.lap("training", args.samples),
    on_validation_end=lambda trainer, _: trainer.sanity_checking or record.lap("evaluation", args.test_samples),
)
strategy = "ddp" if args.devices > 1 else "auto"
options = {"accelerator": "cpu", "devices": args.devices, "strategy": strategy, "max_epochs": args.epochs}
trainer = lightning.Trainer(**options, callbacks=[clock])
train_set, eval_set = workload.mnist(args)
train_loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)
trainer.fit(Classifier(), train_loader, DataLoader(eval_set, batch_size=args.batch))
record.write(trainer.callback_metrics["val_acc"].item(), rank=trainer.global_rank)
