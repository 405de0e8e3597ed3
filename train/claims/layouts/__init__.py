"""Claims about meshes and layouts: numbers, messages, memory, collectives.

Named by configs such as zero, megatron, t3, oneflow, token_ring.

Read first: step.py.
"""
