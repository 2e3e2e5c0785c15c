"""Samples of every type reach the model as they should."""

import pytest
import torch

from lockstep.data.loader import InputConverter

pytestmark = pytest.mark.whole

MEAN, STD = [0.5, 0.25, 0.1], [0.2, 0.5, 0.4]


def converter(channels: int = 3, *, normalise: bool) -> InputConverter:
    options = {"mean": MEAN[:channels], "std": STD[:channels]} if normalise else {}
    return InputConverter(torch.float64, **options)


@pytest.mark.parametrize("shape", [(5, 3, 4, 4), (5, 3), (5, 3, 7)])
def test_samples_are_scaled_and_normalised_by_channel(shape: tuple[int, ...]) -> None:
    values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(numbers, dtype=torch.double).view(-1, *[1] * (len(shape) - 2)) for numbers in (MEAN, STD))
    scaled = values.double() / 255
    for samples in (values, scaled, scaled.float()):
        tolerance = {"rtol": 0, "atol": 1e-6 if samples.dtype == torch.float32 else 1e-14}
        torch.testing.assert_close(converter(normalise=False)(samples), scaled, **tolerance)
        torch.testing.assert_close(converter(normalise=True)(samples), (scaled - mean) / std, **tolerance)
        alone = InputConverter(torch.float64, std=STD)
        torch.testing.assert_close(alone(samples), scaled / std, **tolerance)
