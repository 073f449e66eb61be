"""Attention and quantization kernels, each with its plain-torch reference."""
