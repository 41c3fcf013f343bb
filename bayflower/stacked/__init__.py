"""Many clients on one device: stacks of models, layers and kernels for them, what fits into memory.
The fused engine is made of these.
"""
