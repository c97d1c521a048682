"""EvoPress: an evolutionary search for how much each part of a model is compressed (arXiv:2410.14649)."""
