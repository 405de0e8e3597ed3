"""The feed-forward half of a layer: an mlp, or experts behind a router.

models/layer.py alone imports mlp.Mlp and moe.Moe (claims may); everybody may
import router.py.

Read first: mlp.py, then moe.py.
"""
