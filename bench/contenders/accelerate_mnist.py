"""An Accelerate loop, as in Hugging Face's complete examples."""

import torch
import workload
from accelerate import Accelerator
from record import Record
from torch import nn
from torch.utils.data import DataLoader

args, record = workload.arguments(), Record()
accelerator = Accelerator(cpu=True)
train_set, eval_set = workload.mnist(args)
model, criterion = workload.ConvNet(), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 1e-4)
train_loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)
eval_loader = DataLoader(eval_set, batch_size=args.batch, shuffle=False)
parts = accelerator.prepare(model, optimizer, train_loader, eval_loader)
model, optimizer, train_loader, eval_loader = parts

for epoch in range(args.epochs):
    record.start()
    model.train()
    for image, label in train_loader:
        loss = criterion(model(image), label)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        record.stepped()
    record.lap("training", len(train_set))

    model.eval()
    accurate, seen = 0, 0
    for image, label in eval_loader:
        with torch.no_grad():
            outputs = model(image)
        predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), label))
        accurate_preds = predictions == references
        seen += accurate_preds.shape[0]
        accurate += accurate_preds.long().sum()
    accelerator.print(f"epoch {epoch}: {100 * accurate.item() / seen:.2f}")
    record.lap("evaluation", len(eval_set))

accelerator.wait_for_everyone()
accelerator.save(accelerator.unwrap_model(model).state_dict(), "mnist.pth")
record.write(accurate.item() / seen, rank=accelerator.process_index)
accelerator.end_training()
