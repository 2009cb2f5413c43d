"""Models that a framework is handed get fused kernels."""
