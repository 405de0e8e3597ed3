"""Experiments, one file each; `paraxis papers` lists them.

schema.py documents every field, presets.py has what most configs begin with: a
user's own config imports either. base/ holds what the schema and the command
line are made of. Configs are data: claims are imported in the body of claims().

Read first: quickstart.py (a model from scratch; finetune.py: from weights of
others), then schema.py and presets.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
