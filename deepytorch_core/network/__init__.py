"""What lies between nodes: its measured rate, delay and caps, and what NCCL is told about it."""
