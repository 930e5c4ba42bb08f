"""The CUDA kernels, compiled by NVRTC: what its reports say."""
