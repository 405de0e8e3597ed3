"""A state on disk: any layout, verified on every load.

From outside: store.py, and fingerprint.py to compare states.

Read first: store.py, then manifest.py.
"""
