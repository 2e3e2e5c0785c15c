"""A step that averages weights, a task and a model.

task._target_=my_mean_teacher.Consistency +task.noise=0.1 +task.weight=10 +task.rampup_epochs=2
model._target_=my_mean_teacher.StudentAndTeacher '+model.student={_target_: <your net>, ...}'
step._target_=my_mean_teacher.AveragingStep +step.decay=0.99
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.tasks.base import Task
from lockstep.training.step import Step


class StudentAndTeacher(nn.Module):
    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, copy.deepcopy(student).requires_grad_(False)


class Consistency(Task):
    """A student agrees with the average of its own weights, under other noise (Tarvainen and Valpola 2017)."""

    better = {"loss": "min", "accuracy": "max"}
    monitor = "accuracy"

    def __init__(self, noise: float, weight: float, rampup_epochs: float) -> None:
        self.noise, self.weight, self.rampup_epochs = noise, weight, rampup_epochs

    def outputs(self, model, inputs):
        noise = self.noise if model.training else 0.0
        noisy = inputs + noise * torch.randn_like(inputs) if noise else inputs
        return model.student(noisy), model.teacher(inputs)

    def __call__(self, outputs, targets):
        student, teacher = outputs
        weight = self.weight * min(1.0, self.progress.epoch / self.rampup_epochs)
        apart = (student.softmax(1) - teacher.softmax(1)).square().mean(1)
        loss = F.cross_entropy(student, targets, reduction="none") + weight * apart
        return {"loss": loss, "accuracy": teacher.argmax(1) == targets}


class AveragingStep(Step):
    def __init__(self, *, decay: float, **parts) -> None:
        super().__init__(**parts)
        self.decay, self.model = decay, self.strategy.model

    def update(self, optimizer=None) -> None:
        super().update(optimizer)
        with torch.no_grad():
            for average, weight in zip(self.model.teacher.parameters(), self.model.student.parameters(), strict=True):
                average.lerp_(weight, 1 - self.decay)
