"""Ctrl-C where Python goes on, as in a notebook; data that changes under a run.

The state is saved or left at the last commit, the folder is free, and the same
call goes on in the same process.
"""

import gc
import signal

import jax
import pytest
import support

from paraxis.configs.base import errors
from paraxis.train import start
from paraxis.train.run import evaluate
from paraxis.train.run import header
from paraxis.train.run import metrics
from paraxis.train.run import workdir as workdir_lib

MESH = 'data=1'


@pytest.fixture(scope='module')
def whole(tiny, tmp_path_factory):
  """A run of 6 steps that nothing interrupts."""
  workdir = tmp_path_factory.mktemp('whole') / 'run'
  tiny.run(workdir, mesh=MESH)
  return workdir


def _live():
  gc.collect()
  return sum(x.nbytes for x in jax.live_arrays())


def _pressed(function):
  """The function, after Ctrl-C."""

  def called(*arguments, **options):
    signal.raise_signal(signal.SIGINT)
    return function(*arguments, **options)

  return called


@pytest.mark.fault(46)
@pytest.mark.parametrize(
  'place, name', [(start, 'state'), (start, '_check'), (header, 'trace')]
)
def test_before_the_first_step(tiny, whole, tmp_path, monkeypatch, place, name):
  """Nothing is to be saved: KeyboardInterrupt, and all is as it was."""
  with pytest.raises(support.KilledError):  # something to resume from
    tiny.run(tmp_path, mesh=MESH, callbacks=[support.crash_at(3)])
  before, saved = _live(), support.fingerprints(tmp_path, 2)
  with monkeypatch.context() as patch:
    patch.setattr(place, name, _pressed(getattr(place, name)))
    try:
      tiny.run(tmp_path, mesh=MESH)
      pytest.fail('it was not interrupted')
    except KeyboardInterrupt:
      pass
  assert _live() <= before
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  workdir_lib.Lock(tmp_path).close()
  assert support.fingerprints(tmp_path, 2) == saved
  result, said = tiny.run(tmp_path, mesh=MESH)
  assert result['step'] == 6 and 'resumed from step 2' in '\n'.join(said)
  assert support.fingerprints(tmp_path, 6) == support.fingerprints(whole, 6)


@pytest.mark.fault(46)
@pytest.mark.parametrize('often', [[2], [1, 4]])
def test_between_steps(tiny, whole, tmp_path, often):
  """Saved, and `run` returns: the cell is run again until it is done."""
  before = None
  for step in often:
    press = lambda at, values, job, step=step: (
      at == step and signal.raise_signal(signal.SIGINT)
    )
    result, said = tiny.run(tmp_path, mesh=MESH, callbacks=[press])
    assert result['stopped'] == 'SIGINT' and result['step'] == step + 1
    assert said[-1] == f'stopped by SIGINT after step {step + 1}, saved ' + str(
      step + 1
    )
    del press
    before = before or _live()
    assert _live() <= before
  result, _ = tiny.run(tmp_path, mesh=MESH)
  assert result['step'] == 6 and not result['stopped']
  assert support.fingerprints(tmp_path, 6) == support.fingerprints(whole, 6)
  assert support.losses(tmp_path) == support.losses(whole)


def test_in_the_evaluation(tiny, whole, tmp_path, monkeypatch):
  """All steps are saved by then; the next call evaluates again."""
  with monkeypatch.context() as patch:
    called = evaluate.Evaluator.__call__
    patch.setattr(evaluate.Evaluator, '__call__', _pressed(called))
    result, said = tiny.run(tmp_path, mesh=MESH)
  assert result['stopped'] == 'SIGINT' and result['step'] == 6
  assert said[-1] == 'stopped by SIGINT after step 6, saved 6'
  result, _ = tiny.run(tmp_path, mesh=MESH)
  assert not result['stopped'] and result['evaluation']
  assert support.fingerprints(tmp_path, 6) == support.fingerprints(whole, 6)


def test_in_an_evaluation_on_the_way(tiny, whole, tmp_path, monkeypatch):
  """Its step is saved, the evaluation is of the next start, or the one after:
  no step waits for it."""
  fields = {'train.eval_every': 3, 'checkpoint.every': 100}
  called, ends = evaluate.Evaluator.__call__, []
  with monkeypatch.context() as patch:
    patch.setattr(evaluate.Evaluator, '__call__', _pressed(called))
    for _ in range(2):
      result, said = tiny.run(tmp_path, fields, MESH)
      ends.append((result['stopped'], result['step'], said[-1]))
      assert result['evaluation'] is None
      assert not any(line.startswith('held-out') for line in said)
  text = 'stopped by SIGINT after step 3, saved 3'
  assert ends == [('SIGINT', 3, text)] * 2
  assert not any('eval/loss' in row for row in metrics.read(tmp_path).values())
  result, said = tiny.run(tmp_path, fields, MESH)
  assert sum(line.startswith('held-out') for line in said) == 1
  rows = metrics.read(tmp_path)
  assert [s for s in rows if 'eval/loss' in rows[s]] == [3, 6]
  assert support.fingerprints(tmp_path, 6) == support.fingerprints(whole, 6)


@pytest.mark.fault(36)
def test_tokens_that_change_under_a_run(tiny, tmp_path):
  """Ends with 14 and says where; the next start builds the cache again."""
  fields = {'data.cache_dir': str(tmp_path / 'tokens'), 'train.steps': 24}

  def damage(step, values, job):
    if step == 3:
      (file,) = (tmp_path / 'tokens').glob('*/tokens.bin')
      with open(file, 'r+b') as opened:
        opened.write(b'\xff' * file.stat().st_size)

  run = tmp_path / 'run'
  with pytest.raises(errors.IntegrityError) as caught:
    tiny.run(run, fields, MESH, callbacks=[damage])
  text = str(caught.value)
  assert text.startswith(f'token cache {tmp_path}/tokens/song') and (
    'id 65535 in row ' in text
    and '(song/' in text
    and 'of 259 ids' in text
    and '\n' not in text
  ), text
  assert 3 <= max(metrics.read(run)) < 24
  result, said = tiny.run(run, fields, MESH)
  lines = [line for line in said if 'is damaged' in line]
  assert len(lines) == 1 and lines[0].endswith('building it again.')
  assert 'tokens.bin does not match its checksum' in lines[0]
  assert result['step'] == 24 and 'resumed from' in '\n'.join(said)
  tiny.run(tmp_path / 'never', fields, MESH)
  found, wanted = (
    support.fingerprints(tmp_path / name, 24) for name in ('run', 'never')
  )
  assert found == wanted
