"""Training: the loop in `loop`, data in `data`, the command in `command`; what is fitted is in `specjax.objectives`."""
