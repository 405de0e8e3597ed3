"""Hugging Face models: their config.json and their tensors, by our names.

config.py translates config.json to a schema.Model and back, leaves.py says
which tensors a parameter is made of, families.py has a row for every model_type
of both. files.py and gguf_file.py read folders and GGUF files, source.py puts
their tensors on a mesh.
Read first: leaves.py.
"""
