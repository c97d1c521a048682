"""Formats of packed weights, one module each; they are decoded to plain numbers while they are read."""
