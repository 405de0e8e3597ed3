"""The token mixers: attention and recurrences behind one protocol.

A mixer is a subclass of protocol.Mixer; a model names it by a letter, whose
row is in configs/base/mixers.py. models/layer.py alone imports the classes
(claims may); everybody may import protocol.py, packed.py, attention.py,
slots.py and latent_rotation.py.

Read first: protocol.py and packed.py, then attention.py, slots.py.
"""
