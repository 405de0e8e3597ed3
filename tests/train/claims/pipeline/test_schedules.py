"""The simulated claims about pipelines hold, and fail on wrong numbers."""

import pytest

from paraxis.configs.base import errors
from paraxis.train.claims.pipeline import schedules as claims_pipeline

GRID = [[4, 8, 1], [8, 16, 1]]
SHAPE = dict(layers=32, hidden=3072, sequence=2048)
VOCABULARIES = [32768, 262144]


@pytest.mark.parametrize(
  'schedule, cases, share, model',
  [
    ('gpipe', GRID, 1, 'lock_step'),
    ('one_f_one_b', GRID, 1, 'asynchronous'),
    ('interleaved', [[4, 8, 2], [2, 6, 3]], 1, 'lock_step'),
    ('zero_bubble', GRID, 2 / 3, 'lock_step'),
    ('zero_bubble', GRID, 1 / 3, 'asynchronous'),
  ],
)
def test_bubbles(schedule, cases, share, model):
  given = dict(schedule=schedule, cases=cases, model=model)
  outcome = claims_pipeline.bubbles(None, share=share, **given)
  assert outcome.passed and 'off at most' in outcome.measured
  assert not claims_pipeline.bubbles(None, share=share / 2, **given).passed


def test_bubble_share():
  given = dict(schedule='gpipe', per_stage=4, stages=[2, 8])
  outcome = claims_pipeline.bubble_share(None, at_most=0.2, **given)
  assert outcome.passed and outcome.measured == '17.9%'  # 7 / (32 + 7)
  assert not claims_pipeline.bubble_share(None, at_most=0.17, **given).passed


def test_trend():
  check = lambda expected, *cases, within=0.05: claims_pipeline.trend(
    None, schedule='one_f_one_b', cases=cases, expected=expected, within=within
  )
  stages = (2, 8), (4, 8), (8, 8)
  assert check('rises', *stages).passed
  assert check('rises', *stages).measured == '1.125 1.375 1.875'
  assert not check('rises', *stages[::-1]).passed
  assert not check('constant', *stages).passed
  assert check('constant', (8, 32), (16, 64), (32, 128)).passed
  more = (4, 8), (4, 32), (4, 128), (4, 256)
  assert check('falls', *more).passed
  assert not check('falls', *more, within=0.005).passed  # still gains 1.2%
  assert not check('falls', *more[::-1]).passed
  with pytest.raises(errors.UserError, match='rises, constant, falls'):
    check('sinks', *more)


def test_inputs_held():
  check = lambda *a: claims_pipeline.inputs_held(
    None, **dict(zip(('schedule', 'cases', 'balanced'), a, strict=True))
  )
  assert check('interleaved', [[4, 16, 2, 11], [8, 32, 2, 23]], False).passed
  assert not check('interleaved', [[4, 16, 2, 10]], False).passed
  assert check('v_half', [[4, 16, 2, 8]], True).passed
  assert not check('v_half', [[4, 16, 2, 8]], False).passed


def test_vocabulary_speedup():
  """Against even layers it is the last stage's work over the mean, less the
  ramp; moving whole layers helps less than spreading the head."""
  given = dict(
    shape=SHAPE, stages=8, microbatches=64, vocabularies=VOCABULARIES
  )
  check = lambda against, *between: claims_pipeline.vocabulary_speedup(
    None, against=against, between=between, **given
  )
  layer = 24 * 3072**2 + 4 * 2048 * 3072
  heads = [2 * 3072 * v / layer for v in VOCABULARIES]
  even = [(4 * 71 + 64 * h) / (4 * 71 + 64 * h / 8) for h in heads]
  found = check('even', 1, 8)
  assert found.passed
  assert found.measured == ' '.join(f'{x:.2f}' for x in even) == '1.15 2.07'
  assert not check('even', 1, 2).passed and not check('even', 1.2, 8).passed
  found = check('redistributed', 1, 8)
  assert found.passed and found.measured == '1.15 1.32'
  for against in ('even', 'redistributed'):
    with claims_pipeline.head_last():
      assert not check(against, 1, 8).passed
  with pytest.raises(errors.UserError, match='even or redistributed'):
    check('layers', 1, 8)


def test_layers_are_all_redistributed():
  for layers, stages, head in [(32, 8, 0.8), (32, 8, 6.4), (48, 16, 3.0)]:
    counts = claims_pipeline._redistributed(layers, stages, head)
    assert sum(counts) == layers and len(counts) == stages
    assert max(*counts[:-1], counts[-1] + head) <= layers / stages + head


def test_skip_makespan():
  given = dict(stages=6, microbatches=24, fraction=0.5, send=0)
  outcome = claims_pipeline.skip_makespan(None, below=0.75, **given)
  assert outcome.passed and 'lock step' in outcome.caveat
  assert not claims_pipeline.skip_makespan(None, below=0.7, **given).passed
  given['fraction'] = 0
  assert not claims_pipeline.skip_makespan(None, below=1, **given).passed
