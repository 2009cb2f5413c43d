"""The key that loaders which plan add to their batches."""

BATCH_KEY = "deepytorch_packing"
"""The key under which a batch of a loader that plans has its `deepytorch_core.data.Packing`."""
