"""Objectives of the drafters that read the target's features, one file each."""
