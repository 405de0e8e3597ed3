"""Checks of saving hold, and fail where what they check is broken."""

import contextlib

import claim_cases
from orbax.checkpoint._src.multihost import multihost
import pytest

from paraxis.train.bench import checkpoint as bench
from paraxis.train.bench import measure
from paraxis.train.claims import experiment
from paraxis.train.claims.checkpoint import saving

SMALL = experiment.under(
  'model', dict(d_model=16, d_ff=16, num_heads=2, num_layers=1)
) | {
  'data.sequence_length': 16, 'train.steps': 4, 'checkpoint.keep': 4,
}  # fmt: skip


@pytest.mark.filterwarnings('ignore:coroutine')  # of writes that failed
def test_files_hold_what_was_asked_until_it_is_donated(monkeypatch):
  # Threads of a save that Orbax could not begin wait so long, and the process
  # with them: five minutes where nobody says otherwise.
  monkeypatch.setattr(multihost, 'coordination_timeout', lambda: 20)
  _, wrong = claim_cases.falls(
    'datastates', 'copies', SMALL, mesh='data=2,fsdp=2'
  )
  # The last state is donated to nothing.
  assert wrong.measured == '1 of 4' and 'losses equal' in wrong.caveat


def test_a_run_that_trains_otherwise_is_found(monkeypatch):
  """The reference is a loop of its own: another learning rate, say."""
  run = claim_cases.run_of('datastates', SMALL)
  saved = saving._saved
  faster = {'optimizer.learning_rate': 0.1}
  other = lambda config, *given: saved(
    experiment.fields(config, faster), *given
  )
  monkeypatch.setattr(saving, '_saved', other)
  found = saving.holds_what_was_asked(run, mesh='data=2')
  assert not found.passed and 'other losses' in found.measured


def times(ours, synchronous):
  """What `measure.interleave` gives: sizes 32 and 512, three rounds."""
  found = {}
  for size, mine, other in zip((32, 512), ours, synchronous, strict=True):
    found[f'{size}, ours'] = [mine, 2 * mine, mine]
    found[f'{size}, synchronous'] = [other] * 3
  return found


SIZES = dict(megabytes=[32, 512], steps=[1, 8], rounds=3)


def test_stalls_are_ratios(monkeypatch):
  shown = times((0.01, 0.02), (0.2, 4.0))
  monkeypatch.setattr(saving, '_measured', lambda *given: shown)
  check = lambda at_least: saving.stall(None, at_least=at_least, **SIZES)
  assert check(20).passed and check(20).measured == '20 200'
  assert not check(21).passed  # at the smaller size
  assert '512 MiB: 4000 ms over 20.0 ms, in steps of 8 s' in check(20).caveat


def test_growth_is_of_the_synchronous_one(monkeypatch):
  """Ours doubles; a synchronous save grows to so much, from 0.2."""
  for grown, passed, measured in (
    (4.0, True, '0.100'),
    (0.8, True, '0.500'),
    (0.4, False, '1.000'),
  ):
    shown = times((0.01, 0.02), (0.2, grown))
    monkeypatch.setattr(saving, '_measured', lambda *given, s=shown: s)
    found = saving.growth(None, at_most=0.5, **SIZES)
    assert (found.passed, found.measured) == (passed, measured)


def test_forms_are_measured_in_turn(monkeypatch):
  """Real stores, tiny arrays; without the thread ours waits as they do."""
  seen = []

  def interleave(made, rounds, now):
    for call in made.values():
      seen.append(call())
    return {}

  monkeypatch.setattr(measure, 'interleave', interleave)
  monkeypatch.setattr(bench, 'arrays', lambda n, size: {'a': bench.jnp.ones(8)})
  pauses = []
  monkeypatch.setattr(saving.time, 'sleep', pauses.append)
  saving._measured.__wrapped__((1,), (2.0,), 1)
  (found,) = seen
  assert pauses == [2.0] * 2 * (bench.SAVES + 1)
  assert set(found) == {', ours', ', synchronous'} and found[', ours'] > 0


def test_without_the_thread_a_save_is_written_when_it_is_begun(tmp_path):
  folders = {
    'at once': saving.written_at_once,
    'beside': contextlib.nullcontext,
  }
  for name, off in folders.items():
    store = bench.Ours(tmp_path / name)
    try:
      with off():
        store.begin({'a': bench.jnp.ones(8)})
        assert (tmp_path / name / '0').exists() == (name == 'at once')
    finally:
      store.close()
