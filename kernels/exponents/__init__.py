"""bfloat16 numbers stored as one byte each and a Huffman code of the exponent."""

from specjax.kernels.exponents.api import numbers

__all__ = ["numbers"]
