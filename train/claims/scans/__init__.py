"""Claims about recurrent mixers: sharded scans, hybrids, recall.

Named by configs such as gated_linear_attention, mamba_hybrid, pararnn, tcnca.

Read first: sharded.py.
"""
