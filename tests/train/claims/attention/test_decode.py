"""Claims about the even division hold, and fail when it is broken."""

import numpy as np
import pytest

from paraxis.pallas_kernels.decode_attention import schedule as decode_schedule
from paraxis.train.claims.attention import decode as claims

MACHINE = dict(heads=2, tile=64, workers=8, part=0.5)


def test_in_order():
  assert claims.in_order([3, 1, 1, 1], 2) == 3
  assert claims.in_order([1, 1, 1, 3], 2) == 4  # the long one comes last


def test_makespans_by_hand():
  lengths = [640, 64, 64, 0]  # 10, 1, 1 and no tiles
  assert claims.by_row(lengths, 64, 4, 0.5) == 10.5
  # 3 of 4 workers cannot be filled by whole rows: the longest row is cut.
  assert claims.splits_of(4, 10, 4) == 1
  assert claims.splits_of(1, 10, 4) == 4
  assert claims.fixed_split([640], 64, 4, 0.5) == 3.5
  assert claims.even([640], 64, 4, 0.5) == 3.5
  assert claims.even(lengths, 64, 4, 0.0) == 3
  assert claims.even(lengths, 64, 4, 0.5) == 4.5  # two rows more: 1 + 1 + 1


def test_even_is_a_fixed_split_where_that_fits():
  for n in (1, 2, 4):
    lengths = [512] * n
    assert claims.even(lengths, 64, 8, 0.5) == claims.fixed_split(
      lengths, 64, 8, 0.5
    )


def test_makespans():
  ask = lambda **given: claims.makespans(
    None,
    **dict(
      against='row', sizes=[[4096, 1], [4096, 4]], machine=MACHINE,
      at_least=1.5, none_below=0.9,
    ) | given,
  )  # fmt: skip
  found = ask()
  assert found.passed and 'one long' in found.caveat
  assert not ask(at_least=100).passed
  assert not ask(none_below=1.5).passed
  assert not ask(against='even', at_least=1.01).passed


def test_balance(monkeypatch):
  ask = lambda: claims.balance(
    None, draws=5, rows=4, longest=640, tile=64, workers=[1, 3, 8]
  )
  assert ask().passed and ask().measured == '1'
  make = decode_schedule.make

  def uneven(*args):
    plan = make(*args)
    worker = plan.worker.copy()
    worker[1:-1] = worker[-1]  # the first takes all
    return plan._replace(worker=worker)

  monkeypatch.setattr(decode_schedule, 'make', uneven)
  assert not ask().passed


def test_any_division(monkeypatch):
  ask = lambda: claims.any_division(
    None, lengths=[0, 5, 64, 130], tile=64, workers=[3], within=1e-12
  )
  assert ask().passed
  merge = decode_schedule.merge_pieces
  monkeypatch.setattr(
    decode_schedule,
    'merge_pieces',
    lambda o, lse, *rest: merge(o, lse * 0, *rest),  # all pieces weigh the same
  )
  assert not ask().passed


def test_shared_prefix(monkeypatch):
  ask = lambda: claims.shared_prefix(
    None, prefix=20, lengths=[0, 1, 30], within=1e-12
  )
  found = ask()
  assert found.passed and 'slots read: 51 instead of 91' in found.caveat
  monkeypatch.setattr(decode_schedule, 'merge', lambda a, b: a)
  assert not ask().passed


@pytest.mark.aot
def test_compiled():
  from paraxis.sharding.meter import aot

  if aot.missing('tpu'):
    pytest.skip(aot.missing('tpu'))
  found = claims.compiled(
    None, topologies=['v5e:1x1'], rows=2, slots=2048, within=0.05
  )
  assert found.passed and 'v5e:1x1' in found.caveat
  assert 0 < float(found.measured.rstrip('%')) < 5


def test_batches():
  drawn = claims.batches(4096, 4, 3)
  assert drawn['equal'] == [[4096] * 4]
  assert drawn['one long'] == [[4096, 64, 64, 64]]
  assert len(drawn['spread']) == 3
  assert all(x[0] == max(x) and min(x) >= 64 for x in drawn['spread'])
  assert len({tuple(x) for x in drawn['spread']}) == 3
  assert np.all(np.array(drawn['spread']) <= 4096)
