"""`paraxis verify`: what it certifies, prints and refuses.

That all layouts hold is tests/train/certify/test_invariance.py; that every
property can fail, tests/train/certify/test_properties.py.
"""

import dataclasses
import json

import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.train.certify import certification
from paraxis.train.certify import trial
from paraxis.train.certify import verify

FULL = schema.Config(
  model=schema.Model(
    vocab_size=1024, d_model=128, num_layers=6, num_heads=4, d_ff=256
  )
)


def certify(*names, mesh='data=2', dtype='float64', **train):
  config = dataclasses.replace(FULL, train=schema.Train(**train))
  return verify.certify(verify.prepare(config, mesh, dtype), names)


def test_everything_is_certified():
  lines = []
  config = dataclasses.replace(
    FULL,
    mesh=schema.Mesh(zero=2),
    optimizer=schema.Optimizer(name='muon'),
    train=schema.Train(microbatches=2, remat='full'),
  )
  code = verify.run(config, 'data=2,context=2,tensor=2', say=lines.append)
  assert code == errors.EXIT_OK, lines
  text = '\n'.join(lines)
  assert lines[0].startswith('data=2,context=2,tensor=2 zero=2: 8 cpu devices')
  assert 'model.d_model 128 -> 32' in text and 'all 15 properties hold' in text
  rows = [line.split() for line in lines if line.startswith('PASS')]
  assert len(rows) == 15
  for words in (
    'loss', 'gradients, every one of', 'one update', 'layout', '0.05 lr',
    'accumulation: 1 microbatches instead of 2', 'remat none', 'remat dots',
    'remat attention', 'remat full with offload', 'packing', 'bitwise',
    'evaluation: the same', 'evaluation: bits per byte',
    'next nats a token on data=2,fsdp=2,tensor=2',
  ):  # fmt: skip
    assert words in text, words
  assert 'remat full ' not in text.replace('remat full with', '')


def test_json_and_exit_codes(monkeypatch):
  row = certification.Verdict('loss', 1e-9, 2e-16, True, '')
  lost = certification.Verdict(
    'gradients', 1e-9, float('inf'), False, 'embedding'
  )
  full = dataclasses.replace(FULL, train=schema.Train(batch_size=64))
  for rows, code in (([row], 0), ([row, lost], errors.EXIT_DIFFERENT)):

    def certified(subject, report=None, rows=rows):
      del subject
      list(map(report, rows))
      return rows

    monkeypatch.setattr(verify, 'certify', certified)
    lines = []
    assert verify.run(full, 'data=64', True, say=lines.append) == code
    (text,) = lines
    found = json.loads(text, parse_constant=pytest.fail)
    assert found['passed'] == (not code) and len(found['rows']) == len(rows)
    assert found['layout'] == 'data=8' and found['devices'] == 8
    assert found['notes'][0].startswith('mesh data=64 -> data=8')
    assert found['config']['model']['d_model'] == 32
    lines.clear()
    assert verify.run(FULL, 'data=8', say=lines.append) == code
  assert found['rows'][1]['measured'] is None
  assert lines[-2].startswith('FAIL  gradients') and 'embedding' in lines[-2]
  assert lines[-1] == '1 of 2 properties DIFFER'


def test_float32_has_its_own_bounds():
  names = ('loss', 'gradients', 'update', 'steps')
  rows = certify(*names, mesh='fsdp=2,tensor=2', dtype='float32')
  assert len(rows) == 4 and all(row.passed for row in rows), rows
  assert rows[1].measured > 1e-9  # it is not float64 by another name
  assert rows[1].bound == 1e-5


@pytest.mark.parametrize('mesh', ['fsdp=2,tensor=2', 'stage=2,tensor=2'])
def test_bfloat16_may_be_twice_as_wrong_as_one_device(mesh):
  """On stages one draw of parameters was 2.1 times, with nothing wrong."""
  rows = certify('loss', 'gradients', 'update', mesh=mesh, dtype='bfloat16')
  assert len(rows) == 3 and all(row.passed for row in rows), rows
  assert rows[0].bound == rows[1].bound == 2
  assert 0.9 < rows[1].measured < 1.5


def test_more_than_twice_is_seen(monkeypatch):
  """Three bits of one matrix less, on a mesh alone."""
  start = trial.Runner.start

  def coarse(runner, params):
    if len(runner.devices) > 1:
      path = 'layers/mlp/up'
      x = np.asarray(params[path])
      step = 2.0 ** (np.floor(np.log2(np.abs(x))) - 4)
      params = params | {path: np.round(x / step) * step}
    return start(runner, params)

  monkeypatch.setattr(trial.Runner, 'start', coarse)
  (row,) = certify('gradients', mesh='data=2', dtype='bfloat16')
  assert not row.passed and row.measured < 100, row


def test_where_bfloat16_has_no_digits_nothing_is_certified(monkeypatch):
  monkeypatch.setattr(certification, 'CHAOS', 1e-4)
  monkeypatch.setattr(trial, 'excess', lambda *given: (3.0, 'embedding'))
  (row,) = certify('gradients', dtype='bfloat16')
  assert row.word == 'NOT CERTIFIED' and 'one device itself' in row.why


# ------------------------------------------------------------- bad input


@pytest.mark.parametrize(
  'mesh, dtype, text',
  [
    ('tensor=8', 'float64', "'heads' has size 4, which tensor=8 .*: 8"),
    ('data=16', 'float64', 'train.batch_size=8: .* data=16 does not divide'),
    ('data=2,fsdp=2,context=2,tensor=2', 'float64', '16 devices, there are 8'),
    ('data=8', 'float16', "--dtype=float16 .* Did you mean 'bfloat16'"),
    ('date=8', 'float64', "Did you mean 'data'"),
    ('stage=8', 'float64', 'mesh.stage=8 x pipeline.chunks=1'),
  ],
)
def test_what_cannot_be_certified(mesh, dtype, text):
  with pytest.raises(errors.UserError, match=text):
    verify.prepare(FULL, mesh, dtype)


def test_the_rest_of_the_devices():
  subject = verify.prepare(FULL, 'data=2,tensor=-1')
  assert subject.config.mesh.tensor == 4 and len(subject.devices) == 8
  assert len(verify.prepare(FULL, 'data=2').devices) == 2


def test_one_device_is_compared_with_itself():
  """It has no other layout to resume on."""
  rows = certify('resume', mesh='data=1')
  assert [row.passed for row in rows] == [True, True], rows
  assert 'data=1' in rows[1].name
