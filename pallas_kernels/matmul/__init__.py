"""Products that are more than a product: 4-bit weights, groups, cross-entropy.

From outside: quantized.py, grouped.py, cross_entropy.py.

Read first: grouped.py.
"""
