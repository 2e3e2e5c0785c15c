"""nanoGPT's training loop with its recipe for a CPU, written anew: characters of tinyshakespeare, 4 layers of 128."""

import math
from pathlib import Path

import numpy as np
import torch
import workload
from record import Record
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK, LAYERS, HEADS, WIDTH = 64, 4, 4, 128
LR, LAST_LR, WARMUP = 1e-3, 1e-4, 100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.c_attn, self.attn_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.c_fc, self.mlp_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.size()
        parts = self.c_attn(self.ln_1(x)).split(width, 2)
        heads = (part.view(batch, time, HEADS, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).contiguous().view(batch, time, width))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(symbols, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks, self.ln_f = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, symbols, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * LAYERS) if "_proj" in name else 0.02)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def get_batch(split: str, batch: int) -> tuple[Tensor, Tensor]:
    data = np.memmap(f"{split}.bin", np.uint16, "r")  # anew each time, as nanoGPT does
    starts = torch.randint(len(data) - BLOCK, (batch,)).tolist()
    rows = [torch.from_numpy(data[start : start + BLOCK + 1].astype(np.int64)) for start in starts]
    return torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows])


def rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    return LAST_LR + 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP))) * (LR - LAST_LR)


@torch.no_grad()
def estimate_loss(model: nn.Module, batch: int) -> dict[str, float]:
    model.eval()
    losses = {split: [model(*get_batch(split, batch)).item() for _ in range(20)] for split in ("train", "val")}
    model.train()
    return {split: sum(found) / len(found) for split, found in losses.items()}


if __name__ == "__main__":
    args, record = workload.arguments(), Record()
    # train.bin and val.bin, as nanoGPT's prepare.py writes them
    text = (Path(args.data) / "tinyshakespeare" / "input.txt").read_text()
    symbols, tokens = np.unique(list(text), return_inverse=True)
    for split, part in zip(("train", "val"), np.split(tokens.astype(np.uint16), [int(0.9 * len(tokens))]), strict=True):
        part.tofile(f"{split}.bin")
    torch.manual_seed(1337)
    model = GPT(len(symbols))
    matrices = {"params": [weight for weight in model.parameters() if weight.dim() >= 2], "weight_decay": 0.1}
    groups = [matrices, {"params": [weight for weight in model.parameters() if weight.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99))
    steps_an_epoch = args.samples // args.batch
    batch = get_batch("train", args.batch)
    for epoch in range(args.epochs):
        record.start()
        for step in range(epoch * steps_an_epoch, (epoch + 1) * steps_an_epoch):
            for group in optimizer.param_groups:
                group["lr"] = rate(step, args.epochs * steps_an_epoch)
            loss = model(*batch)
            batch = get_batch("train", args.batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            print(f"iter {step}: loss {loss.item():.4f}")  # --log_interval=1, as its recipe says
            record.stepped()
        record.lap("training", args.batch * steps_an_epoch)
        losses = estimate_loss(model, args.batch)
        print(f"step {(epoch + 1) * steps_an_epoch}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "ckpt.pt")
    record.write()
