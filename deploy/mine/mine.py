"""A net of your own: python src/train.py model=mine"""

from math import prod

from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, shape: list[int], classes: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        return scores
