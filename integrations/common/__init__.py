"""Adapters share this: the contract with the user, groups, compilation, batches."""
