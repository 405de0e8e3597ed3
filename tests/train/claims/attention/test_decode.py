"""Claims about the even division hold, and fail when it is broken."""

import claim_cases
import numpy as np
import support

from paraxis.pallas_kernels.decode_attention import schedule as decode_schedule
from paraxis.train.claims.attention import decode as claims

MACHINE = dict(heads=2, tile=64, workers=8)


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


def test_makespans():
  ask = lambda **given: claims.makespans(
    None,
    **dict(
      against='row', sizes=[[4096, 1], [4096, 4]], machine=MACHINE, part=0.5,
      swept=[0, 4], above=1.05,
    ) | given,
  )  # fmt: skip
  found = ask()
  assert found.passed and 'All 4 cases' in found.caveat
  assert 'costs 0 4 tiles' in found.caveat and 'one row' in found.caveat
  assert not ask(above=100).passed
  low, _, high, _ = found.measured.split()
  # What a part costs is assumed: the least counts.
  least = float(low) + 0.01
  assert least < float(high) and not ask(above=least).passed
  assert not ask(against='even').passed
  # Shared out without cutting rows, nothing is gained.
  with claims.whole_rows():
    assert not ask(above=1).passed


def test_balance():
  make = decode_schedule.make

  def uneven(*args):
    plan = make(*args)
    worker = plan.worker.copy()
    worker[1:-1] = worker[-1]  # the first takes all
    return plan._replace(worker=worker)

  right, _ = claim_cases.holds_until(
    decode_schedule, 'make', uneven, claims.balance,
    draws=5, rows=4, longest=640, tile=64, workers=[1, 3, 8],
  )  # fmt: skip
  assert right.measured == '1'


def test_whole_rows_by_hand():
  with claims.whole_rows():
    # Of 12 tiles 3 each, up to the next row: 10, none, 1 and 1.
    plan = decode_schedule.make(np.array([640, 64, 0, 64]), 640, 64, 4)
    assert np.diff(plan.worker).tolist() == [10, 0, 0, 2]
    assert claims.even([640, 64, 0, 64], 64, 4, 0.5) == 10.5


def test_any_division():
  merge = decode_schedule.merge_pieces
  all_alike = lambda o, lse, *rest: merge(o, lse * 0, *rest)
  given = dict(lengths=[0, 5, 64, 130], tile=64, workers=[3], within=1e-12)
  claim_cases.holds_until(
    decode_schedule, 'merge_pieces', all_alike, claims.any_division, **given
  )
  nan = lambda *pieces: tuple(np.nan * x for x in merge(*pieces))
  claim_cases.holds_until(
    decode_schedule, 'merge_pieces', nan, claims.any_division, **given
  )


def test_shared_prefix():
  right, _ = claim_cases.holds_until(
    decode_schedule, 'merge', lambda a, b: a, claims.shared_prefix,
    prefix=20, lengths=[0, 1, 30], within=1e-12,
  )  # fmt: skip
  assert 'slots read: 51 instead of 91' in right.caveat


CHIP = dict(topologies=['v5e:1x1'], rows=2, slots=2048, within=0.05)


@support.compiles('tpu')
def test_compiled():
  found = claims.compiled(None, **CHIP)
  assert found.passed and 'v5e:1x1' in found.caveat
  assert 0 < float(found.measured.rstrip('%')) < 5


def test_a_kernel_that_copies_the_cache_is_found(monkeypatch):
  claim_cases.compiled_to(monkeypatch, 'tpu_custom_call', temporaries=2**24)
  found = claims.compiled(None, **CHIP)
  assert not found.passed and found.measured == '100.00%'


def test_batches():
  drawn = claims.batches(4096, 4, 3)
  assert drawn['equal'] == [[4096] * 4]
  assert drawn['one long'] == [[4096, 64, 64, 64]]
  assert len(drawn[claims.RAGGED]) == 3
  assert all(x[0] == max(x) and min(x) >= 64 for x in drawn[claims.RAGGED])
  assert len({tuple(x) for x in drawn[claims.RAGGED]}) == 3
  assert np.all(np.array(drawn[claims.RAGGED]) <= 4096)
  assert claims.batches(4096, 1, 3) == {'one row': [[4096]]}  # counted once
