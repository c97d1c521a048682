"""The trained parts of drafters, and their folders on disk. Modules here load flax, so drafters import them where they are used."""
