"""Experiments, one file each; `paraxis papers` lists them.

schema.py documents every field and is what a user's own config imports; base/
holds what the schema and the command line are made of. Configs are data: they
import ml_collections and the schema, and claims in the body of claims() only.

Read first: quickstart.py, then schema.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
