"""Losses, and fused kernels that are swapped in where they are exact and faster."""
