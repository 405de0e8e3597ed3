"""Recurrences: gated, linear, selective, affine, delta, by Newton; convolution.

From outside: gated.py, linear.py, selective.py, affine.py, delta.py, newton.py
and causal_conv.py; files with _xla, _tpu and _gpu are their forms.

Read first: linear.py, then gated.py.
"""
