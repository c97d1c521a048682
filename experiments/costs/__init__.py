"""What parts of decoding cost, for whoever changes them; run from a clone, `python -m experiments.costs.NAME`."""
