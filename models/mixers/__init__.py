"""What mixes the tokens of a layer: attention and recurrences, one protocol.

A mixer is a class of protocol.Mixer's interface, chosen by its letter. From
outside: the classes, by models/layer.py alone, and attention.py's Visibility.

Read first: protocol.py, then attention.py.
"""
