"""Claims about checkpoints: what a save blocks, and what a file holds.

Named by configs such as datastates.

Read first: saving.py.
"""
