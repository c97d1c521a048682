"""bfloat16 numbers of a byte each and a Huffman code of their exponent."""

from specjax.kernels.exponents.api import numbers

__all__ = ["numbers"]
