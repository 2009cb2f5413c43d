"""Handles the network between nodes: its measured rate, delay and caps, and NCCL's settings."""
