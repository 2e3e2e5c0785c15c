"""Models that a training on GPUs once could not train."""

from torch import Tensor, nn


class TakesDict(nn.Module):
    """Adds up two layers, each of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.left(inputs["left"]) + self.right(inputs["right"])
        return out


class Viewing(nn.Module):
    """Its view has no answer for a share without samples."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 64, classes)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.norm(self.convolution(images)).relu()
        out: Tensor = self.head(maps.view(len(maps), -1))
        return out
