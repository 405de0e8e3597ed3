"""How far a reader walks: our frames above a product, the files of a verify.

Counted on the real calls: the gradient of `loop.run` is traced down to the
jnp.einsum of a query projection, and a certification runs up to its first
property.
"""

import dataclasses
import functools
import pathlib
import sys
import traceback

import jax
from jax import numpy as jnp
import pytest

from paraxis.configs import schema
from paraxis.models import aux
from paraxis.train import loop
from paraxis.train.certify import trial
from paraxis.train.certify import verify

ROOT = pathlib.Path(loop.__file__).resolve().parents[1]
# Of these 11 lead to the mixer, 1 is the mixer's, the rest are the product's.
FRAMES = 15
FILES = 13
QUERY = 'BTD,DNH->BTNH'
CONFIG = schema.Config(
  model=schema.Model(
    vocab_size=259, d_model=16, num_layers=2, num_heads=2, d_ff=16,
    attention_block=16,
  ),
  data=schema.Data(sequence_length=32, tokenizer='bytes'),
  train=schema.Train(batch_size=2, steps=1),
)  # fmt: skip


class _ArrivedError(Exception):
  pass


def ours(path):
  """Its path in the repository, if it is a file of ours, else None."""
  if path.startswith('<'):  # made by a library, such as a dataclass's __init__
    return None
  path = pathlib.Path(path).resolve()
  if not path.is_relative_to(ROOT) or 'site-packages' in path.parts:
    return None
  return path.relative_to(ROOT).as_posix()


@pytest.fixture
def walk(monkeypatch, tmp_path):
  """[(file, function)] from loop.run to the query projection's einsum."""
  found, right = [], jnp.einsum

  def einsum(equation, *args, **options):
    if equation != QUERY:
      return right(equation, *args, **options)
    stack = [(ours(f.filename), f.name) for f in traceback.extract_stack()[:-1]]
    found.extend(frame for frame in stack if frame[0])
    raise _ArrivedError

  monkeypatch.setattr(jnp, 'einsum', einsum)
  text = tmp_path / 'text.txt'
  text.write_text('\n\n'.join(['sea wind rock and salt. ' * 9] * 40))
  data = dataclasses.replace(
    CONFIG.data, path=str(text), cache_dir=str(tmp_path / 'tokens')
  )
  config = dataclasses.replace(CONFIG, data=data)
  with pytest.raises(_ArrivedError):
    loop.run(
      config,
      tmp_path / 'run',
      say=lambda line: None,
      devices=jax.devices()[:1],
    )
  return found[found.index(('train/loop.py', 'run')) :]


def test_few_frames_lie_between_the_loop_and_a_product(walk):
  """The count is that of a plain run: scanned layers, no remat."""
  names = [name for _, name in walk]
  assert '__call__' in names and names[0] == 'run'
  assert walk[-1][0] == 'sharding/tensor/worlds.py'
  assert len(walk) <= FRAMES, '\n'.join(map(str, walk))


def test_few_files_are_entered_from_a_certification(monkeypatch):
  """Files of the functions that verify, properties and trial call."""
  certify = {
    f'train/certify/{name}.py' for name in ('verify', 'properties', 'trial')
  }
  name_of, entered = functools.cache(ours), set()

  def record(frame, event, _):
    if event == 'call' and frame.f_back is not None:
      if name_of(frame.f_back.f_code.co_filename) in certify:
        entered.add(name_of(frame.f_code.co_filename))

  # Nothing is compiled: the numbers do not matter here.
  monkeypatch.setattr(
    trial.Runner, 'gradients', lambda *_: (1.0, {}, aux.NOTHING)
  )
  one = functools.partial(verify.certify, properties=('loss',))
  monkeypatch.setattr(verify, 'certify', one)
  sys.setprofile(record)
  try:
    verify.run(CONFIG, 'data=1', dtype='float32', say=lambda line: None)
  finally:
    sys.setprofile(None)
  files = {f for f in entered if f and not f.startswith(('configs/', 'tests/'))}
  assert certify < files and len(files) <= FILES, sorted(files)
