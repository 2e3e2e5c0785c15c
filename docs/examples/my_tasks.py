"""Three tasks as a user writes them: a VAE, and two that take derivatives by the inputs, in training with their graph.

model._target_=my_tasks.VAE +model.pixels=64 +model.width=64 +model.latent=8
task._target_=my_tasks.Annealed +task.steps=100
task._target_=my_tasks.GradientPenalty +task.weight=0.1
task._target_=my_tasks.Trades +task.radius=0.1 +task.steps=3 +task.weight=3.0
"""

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.tasks.base import Task


class GradientPenalty(Task):
    """The outputs change little with the inputs (R1, Mescheder et al. 2018)."""

    better = {"loss": "min", "slope": "min", "accuracy": "max"}
    monitor = "accuracy"

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def outputs(self, model, inputs):
        with torch.enable_grad():  # in an evaluation, too
            inputs = inputs.detach().requires_grad_()
            outputs = model(inputs)
            (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=model.training)
        return outputs, slope

    def __call__(self, outputs, targets):
        logits, slope = outputs
        slope = slope.flatten(1).square().sum(1)
        loss = F.cross_entropy(logits, targets, reduction="none") + self.weight / 2 * slope
        return {"loss": loss, "slope": slope, "accuracy": logits.argmax(1) == targets}


class Trades(Task):
    """An image and the worst one near it have the same outputs (TRADES, Zhang et al. 2019)."""

    better = {"loss": "min", "accuracy": "max", "robust": "max"}
    monitor = "robust"

    def __init__(self, radius: float, steps: int, weight: float) -> None:
        self.radius, self.steps, self.weight = radius, steps, weight

    def outputs(self, model, inputs):
        logits, moved = model(inputs), inputs + 0.1 * self.radius * (inputs - inputs.roll(1, -1))
        goal = logits.detach().log_softmax(1)
        for _ in range(self.steps):
            with torch.enable_grad():  # in an evaluation, too
                moved = moved.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self.divergence(model(moved), goal).sum(), moved)
            moved = moved + self.radius / self.steps * slope.sign()
            moved = inputs + (moved - inputs).clamp(-self.radius, self.radius)
        return logits, model(moved.detach())

    def divergence(self, logits, goal):
        return F.kl_div(logits.log_softmax(1), goal, reduction="none", log_target=True).sum(1)

    def __call__(self, outputs, targets):
        logits, moved = outputs
        loss = F.cross_entropy(logits, targets, reduction="none")
        loss = loss + self.weight * self.divergence(moved, logits.log_softmax(1))
        return {"loss": loss, "accuracy": logits.argmax(1) == targets, "robust": moved.argmax(1) == targets}


class VAE(nn.Module):
    def __init__(self, pixels: int, width: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, pixels))

    def forward(self, images):
        return self.encoder(images).chunk(2, dim=1)


class Annealed(Task):
    """The evidence lower bound (Kingma and Welling 2014), whose second term grows for so many steps (Bowman 2016)."""

    better = {"loss": "min", "reconstruction": "min", "kl": "min"}

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def outputs(self, model, inputs):
        mean, log_variance = model(inputs)
        drawn = mean + (log_variance / 2).exp() * torch.randn_like(mean) if model.training else mean
        share = min(1.0, (self.progress.step + 1) / self.steps) if model.training else 1.0
        return inputs.flatten(1), model.decoder(drawn), mean, log_variance, torch.full_like(mean[:, 0], share)

    def __call__(self, outputs, targets):
        images, decoded, mean, log_variance, share = outputs
        reconstruction = F.binary_cross_entropy_with_logits(decoded, images, reduction="none").sum(1)
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return {"loss": reconstruction + share * kl, "reconstruction": reconstruction, "kl": kl}

    def predictions(self, outputs):
        return {"code": outputs[2]}
