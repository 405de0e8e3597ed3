"""Claims about attention: kernels, parts merged, latents, decoding, short rows.

Named by configs such as flash_attention_2, lean_attention, tpla.

Read first: kernels.py.
"""
