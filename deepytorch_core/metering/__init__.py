"""Optimizer steps, operations and waits for data are counted here."""
