"""gzip beside a model: on the same text, or the reason why not."""

import json

import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.train.claims import held_out
from paraxis.train.run import evaluate


def compared(**fields):
  config = schema.Config(data=schema.with_values(schema.Data(), fields))
  return held_out.against_gzip(config, evaluate.Evaluation(1.0, {}, 10))


@pytest.mark.parametrize('key', ['text', 'body'])
def test_text_under_any_key(tmp_path, key):
  rows = [{key: f'{n} words ' * 20, 'other': 1} for n in range(30)]
  path = tmp_path / 'a.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  found = compared(path=str(path), text_key=key)
  assert found.startswith('bits per byte')


def test_reasons(tmp_path):
  np.zeros(9, '<u2').tofile(tmp_path / 'a.bin')
  talk = {'messages': [{'role': 'user', 'content': 'a'}]}
  (tmp_path / 'b.jsonl').write_text(json.dumps(talk) + '\n')
  for name in ('a.bin', 'b.jsonl'):
    found = compared(path=str(tmp_path / name))
    assert found.endswith('the data are conversations or tokens')
  found = compared(sources=f'{tmp_path}/a.bin:1')
  assert found.endswith('data.sources mixes several texts')
