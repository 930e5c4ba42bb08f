"""The compiled module: its handlers, the run-time compiler and its caches, the CPU kernels."""
