"""Claims about decoding and what it reads.

Named by configs such as marlin.

Read first: quantized.py.
"""
