"""The machine is described here: GPUs, NICs, cores and the links between them."""
