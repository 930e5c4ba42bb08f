"""The CUDA kernels' text, run on the host."""
