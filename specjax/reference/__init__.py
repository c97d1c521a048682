"""Oracles: slow, obvious versions of the fast code, in plain Python and float64 NumPy. Tests compare against them."""
