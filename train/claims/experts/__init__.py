"""Claims about mixtures of experts: numbers, messages, loads, training.

Named by configs such as deepspeed_moe, moe_parallel_folding, demons_lbl.

Read first: layer.py.
"""
