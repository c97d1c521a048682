"""Descriptions of the architectures that `load` reads and `save` writes; `table` has all of them."""
