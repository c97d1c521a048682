"""The number formats of GGUF files, plain or in blocks with shared scales, and the decoding of blocks."""

import dataclasses

import numpy as np

from specjax.models.errors import ModelError
from specjax.models.tensors import FLOATS


@dataclasses.dataclass(frozen=True)
class BlockType:
    """One type.

    Attributes:
      code: its number in files.
      name: in ggml.
      block: how many numbers are stored together.
      bytes: the bytes that they take.
    """

    code: int
    name: str
    block: int
    bytes: int

    @property
    def is_plain(self) -> bool:
        """Whether its numbers are plain floats."""
        return self.name in FLOATS

    def numbers(self, blocks: np.ndarray) -> np.ndarray:
        """Rows of blocks, `[R, n * bytes]` uint8, as float32 `[R, n * block]`.

        Raises:
          ModelError: if the package gguf is needed and not installed.
        """
        if self.is_plain:
            return blocks.view(FLOATS[self.name]).astype(np.float32)
        quants = _quants()
        return quants.dequantize(blocks, quants.GGMLQuantizationType(self.code))


def _quants():
    try:
        from gguf import quants
    except ImportError as error:
        raise ModelError("the blocks of GGUF files are read with the package gguf: pip install gguf") from error
    return quants


TYPES = {
    code: BlockType(code, name, block, size)
    for code, name, block, size in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2),
        (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (22, "IQ2_S", 256, 82), (18, "IQ3_XXS", 256, 98),
        (21, "IQ3_S", 256, 110), (19, "IQ1_S", 256, 50), (29, "IQ1_M", 256, 56), (20, "IQ4_NL", 32, 18),
        (23, "IQ4_XS", 256, 136), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
    )
}  # fmt: skip
"""The supported types by number. Integers, float64, intermediate results of products, and newer types are not
supported."""
