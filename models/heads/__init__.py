"""The trained parts of drafters: small modules that read the target's features."""
