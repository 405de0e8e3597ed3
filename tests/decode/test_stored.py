"""Weights of 16 bits a number: what is said of float32, and where."""

import collections
import types

import gguf_writing
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors

from paraxis.configs import schema
from paraxis.decode import load
from paraxis.decode import stored
from paraxis.models.huggingface import files as files_lib
from paraxis.models.huggingface import source
from paraxis.train.bench import own_run

MODEL = dict(vocab_size=264, d_model=16, num_layers=2, num_heads=2, d_ff=32)
CONFIG = schema.Config()


@pytest.fixture(params=['bfloat16', 'float16', 'float32'])
def folder(request, tmp_path):
  """(type, a folder whose matrices are stored in it, its norms in float32)."""
  path = tmp_path / 'hf'
  dtype = np.dtype(getattr(ml_dtypes, request.param, request.param))
  own_run.write(path, MODEL)
  file = str(path / own_run.TENSORS)
  held = safetensors.load_file(file)
  matrix = lambda x: x.astype(dtype) if x.ndim > 1 else x
  safetensors.save_file({n: matrix(x) for n, x in held.items()}, file)
  return request.param, path


def test_files_say_the_type_of_most_numbers(folder):
  name, path = folder
  files = source.Source(path).files
  assert files.half == (name if name != 'float32' else '')
  for platform in ('cpu', *stored.ACCELERATORS):
    found = stored.lines(files, CONFIG, platform)
    assert len(found) == (bool(files.half) and platform != 'cpu')
    assert all(f'stored in {name}' in line for line in found)
  # Whoever chose something is told nothing.
  for field, value in (('model.dtype', 'bfloat16'), ('decode.weights', 'int4')):
    chosen = schema.with_value(CONFIG, field, value)
    assert not stored.lines(files, chosen, 'gpu')


@pytest.mark.parametrize(
  'kind, half', [('F16', 'float16'), ('BF16', 'bfloat16'), ('F32', '')]
)
def test_a_gguf_file_says_it_too(kind, half, tmp_path):
  gguf_writing.write(tmp_path / 'a.gguf', 'llama')
  gguf_writing.requantised(tmp_path / 'a.gguf', tmp_path / 'b.gguf', kind)
  assert source.Source(tmp_path / 'b.gguf').files.half == half


def test_few_numbers_of_16_bits_are_not_most_of_them():
  of = lambda **numbers: files_lib.half(collections.Counter(numbers))
  assert of(BF16=9, F32=10) == of() == of(Q4_0=3, F16=2) == ''
  assert of(BF16=11, F32=10) == 'bfloat16'


def test_decoding_on_an_accelerator_says_it_once(folder, monkeypatch):
  name, path = folder
  changes = {'data.tokenizer': 'bytes'}
  for platform in ('cpu', 'gpu'):
    monkeypatch.setattr(jax, 'default_backend', lambda on=platform: on)
    said = []
    with load.Weights(path, said.append) as opened:
      config = schema.with_values(schema.view(opened.config()), changes)
      built, *_ = opened.parts(config)
    assert built.model.config.dtype == 'float32'
    lines = [x for x in said if '--config.model.dtype=bfloat16' in x]
    assert len(lines) == (name != 'float32' and platform == 'gpu')


def test_what_is_rounded_a_second_time_is_said():
  files = types.SimpleNamespace(quantized={'Q5_0': 2, 'Q4_1': 3}, half='')
  assert not stored.lines(files, CONFIG, 'gpu')
  chosen = schema.with_value(CONFIG, 'decode.weights', 'int4')
  (line,) = stored.lines(files, chosen, 'cpu')
  assert 'stored as Q4_1 (3), Q5_0 (2) tensors' in line
