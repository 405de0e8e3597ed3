"""Quickstart: a 1.57M-parameter decoder on six kinds of text.

paper: none
mechanism: models/decoder.py
test: tests/train/test_loop.py
run: paraxis reproduce quickstart
expect: TODO
differs: TODO
"""

from paraxis.configs import schema


def get_config():
  """About 270 CPU-seconds on data=2,fsdp=2,tensor=2."""
  config = schema.default()
  config.mesh.data = config.mesh.fsdp = config.mesh.tensor = 2
  return config
