"""Programs to start with `torchrun -m deepytorch.examples.<name>`; deepytorch is on in all."""
