"""Reads one image file as pixels."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

JPEG = (".jpg", ".jpeg")
UNCHANGED = 0  # torchvision.io.ImageReadMode: as many channels as are stored


class ImageReader:
    """The RGB pixels (3, height, width) of a file, uint8, whatever its colours are.

    size: the shorter side is scaled to it and the middle is cut out, which gives (3, size, size); None: images keep
    their size. torchvision decodes JPEGs to the bytes of Pillow in half to two thirds of its time.
    """

    def __init__(self, size: int | None) -> None:
        from torchvision.transforms import v2

        self.size = size
        # The operator that torchvision.io.decode_jpeg calls after a warning that torchvision means to remove it.
        self.decode_jpeg: Any = getattr(torch.ops.image, "decode_jpeg", None)
        self.fit: Any = None if size is None else v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
        self.to_tensor: Any = v2.functional.pil_to_tensor

    def __call__(self, path: Path) -> Tensor:
        """Raises OSError, with the file's name, for a file that is gone or damaged."""
        from PIL import Image

        try:
            pixels = self._jpeg(path)
            if pixels is None:
                with Image.open(path) as file:
                    pixels = self.to_tensor(_with_8_bits(file).convert("RGB"))
            if self.size is not None and pixels.shape[1:] != (self.size, self.size):
                pixels = self.to_tensor(self.fit(Image.fromarray(pixels.permute(1, 2, 0).numpy())))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow raises all of them
            reason = str(error).removesuffix(f": '{path}'")
            raise OSError(f"{path}: {reason}") from error
        return pixels

    def _jpeg(self, path: Path) -> Tensor | None:
        """The pixels of a JPEG; None of other files, and of what Pillow shall read, or say what is wrong with it."""
        if self.decode_jpeg is None or path.suffix.lower() not in JPEG:
            return None
        try:
            stored = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            pixels: Tensor = self.decode_jpeg(stored, UNCHANGED)
        except (RuntimeError, ValueError):
            return None
        return pixels.expand(3, -1, -1) if len(pixels) in (1, 3) else None  # four channels are the inks of a print


def _with_8_bits(file: Any) -> Any:
    """An image of 16 bits a pixel with the upper 8 of them: Pillow would turn all above 255 into white.

    Raises ValueError for pixels that are floats, whose range no file says.
    """
    from PIL import Image

    if file.mode == "F":
        raise ValueError("its pixels are floats, and whole numbers are wanted; store it with 8 or 16 bits")
    if not file.mode.startswith("I"):
        return file
    pixels = np.asarray(file)
    if file.mode != "I" or pixels.max() > 255:  # one of 32 bits may hold numbers of 8
        pixels = pixels // 256
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
