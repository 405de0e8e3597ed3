"""Hugging Face models: their config.json and their tensors, by our names.

config.py translates config.json to a schema.Model and back by rows (rows.py)
that a reader types and counts (reader.py), leaves.py says which tensors a
parameter is made of, families.py has both for every model_type. files.py and
gguf_file.py read folders and GGUF files, source.py puts their tensors on a
mesh.
Read first: leaves.py.
"""
