"""Formats of packed weights, one file each: what they store is made into plain numbers when it is read."""
