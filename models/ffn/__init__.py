"""What follows the mixer in a layer: an mlp, or experts behind a router.

From outside: mlp.Mlp and moe.Moe, by models/layer.py; router.py's counts.

Read first: mlp.py, then moe.py.
"""
