"""Constraints on a model that others published: what they cost and what they do to its texts."""
