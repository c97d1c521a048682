"""Token mixers that keep a running state of a text, one file each; `paths` is what they share."""
