"""Hugging Face models: their config.json and their tensors, by our names.

families/ says of every model_type what its fields and tensors mean. config.py
translates config.json to a schema.Model and back by that, leaves.py says which
tensors a parameter is made of. files.py and gguf_file.py read folders and GGUF
files, source.py puts their tensors on a mesh.
Read first: leaves.py.
"""
