"""Descriptions of the architectures that `load` reads and `save` writes; `table` lists them all."""
