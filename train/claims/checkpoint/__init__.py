"""Claims about checkpoints: what a save blocks, what files hold, other layouts.

Named by datastates and universal_checkpointing.

Read first: saving.py.
"""
