"""The trained parts of drafters, and their folders on disk. Modules here load flax; drafters import them when they use them."""
