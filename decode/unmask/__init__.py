"""Decoding of masked models: a canvas of masks becomes text, in any order.

decode/program.py runs its calls in the loop of all methods; policies.py says
which tokens a call makes final.

Read first: canvas.py, then policies.py.
"""
