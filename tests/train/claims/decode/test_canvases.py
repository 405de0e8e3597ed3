"""Claims about canvases: the ceiling is a bound that can be broken."""

import numpy as np
import pytest
import unmask_cases

from paraxis.configs import schema
from paraxis.train.claims import harness
from paraxis.train.claims import lists
from paraxis.train.claims import on_lists
from paraxis.train.claims import tasks
from paraxis.train.claims.decode import canvases

POLICIES = {'one by one': {}, 'all at once': dict(tokens=4)}


def _run(tmp_path, say=lambda line: None):
  return harness.Run(schema.Config(), tmp_path / 'own', say)


def _ideal(rng, operation, n, places):
  """[{place: token}] of a model that knows all; places: of a call, from the
  answer so far, {place: what is drawn} of every open place -> those taken."""
  answer, calls = [None] * n, []
  while None in answer:
    drawn = {}
    for i in (i for i, x in enumerate(answer) if x is None):
      left = answer.count(None)
      if operation == 'shuffle':
        rest = [x for x in range(n) if x not in answer]
        drawn[i] = int(rng.choice(rest))
      else:
        last = ALL.replacement not in answer and rng.random() < 1 / left
        drawn[i] = ALL.replacement if last else i
    calls.append({i: drawn[i] for i in places(answer, drawn)})
    for i, x in calls[-1].items():
      answer[i] = x
    if not lists.possible(ALL, operation, list(range(n)), answer):
      break
  return answer, calls


ALL = tasks.make('lists', least=4, most=8, items=12)
FIRST = lambda k: lambda answer, drawn: sorted(drawn)[:k]


def _hasty(answer, drawn):
  """One place, until the replacement is there; then all."""
  return sorted(drawn)[: len(drawn) if ALL.replacement in answer else 1]


def _choosy(answer, drawn):
  """All places but that of the replacement, which is drawn again: as a policy
  whose score is the probability of the drawn token."""
  likely = [i for i, x in drawn.items() if x != ALL.replacement]
  return likely[:3] or sorted(drawn)


def _judged(operation, places, rows=1500, n=4):
  rng, found = np.random.default_rng(0), []
  for _ in range(rows):
    answer, calls = _ideal(rng, operation, n, places)
    pairs = lists.chances(ALL, operation, list(range(n)), calls)
    ok = lists.possible(ALL, operation, list(range(n)), answer)
    found.append((None not in answer and ok, pairs, len(calls)))
  return canvases.judged(found)


@pytest.mark.parametrize('operation', ['shuffle', 'replace'])
@pytest.mark.parametrize('k', [1, 2, 4])
def test_a_model_that_knows_all_is_at_its_ceiling(operation, k):
  share, most, above, calls = _judged(operation, FIRST(k))
  assert abs(most - lists.ceiling(operation, [k] * (4 // k))) < 0.03
  assert abs(share - most) < 0.04 and abs(above) < 3
  assert calls <= 4 // k


def test_more_tokens_where_fewer_answers_are_left_is_no_way_above():
  """Counts alone would say so: rows that went well took fewer calls."""
  share, most, above, calls = _judged('replace', _hasty)
  assert share == most == 1 and above == 0 and calls < 4


def test_places_taken_for_what_was_drawn_are_above():
  share, most, above, _ = _judged('replace', _choosy)
  assert share > most and above > 3


def _ceilings(tmp_path, say=lambda line: None, **more):
  given = dict(
    task=unmask_cases.TASK, fields=unmask_cases.FIELDS, policies=POLICIES,
    shown=[], lists_of=[[4], 8],
    learned=[0.9, 0.2], seeds=[0],
  ) | more  # fmt: skip
  return canvases.ceilings(_run(tmp_path, say), **given)


@pytest.fixture
def knows_all(monkeypatch):
  """Models that are right as often as one that knows all, one token a call, and
  say so of one call where it was `one`."""

  def use(one):
    def answers(made, task, operation, n, policy, rows, seed=0, temperature=1):
      del made, task, temperature
      k, rng = policy.get('tokens', 1), np.random.default_rng([seed, n])
      out = []
      for _ in range(rows):
        sure = operation not in ('shuffle', 'replace')
        if sure:
          out.append((True, [(1.0, True)], n // k, 0.0))
          continue
        answer, calls = _ideal(rng, operation, n, FIRST(1 if one else k))
        if one:
          calls = [{c: t for call in calls for c, t in call.items()}]
        pairs = lists.chances(ALL, operation, list(range(n)), calls)
        nats = on_lists.correlation(operation, [*map(len, calls)])
        out.append((all(ok for _, ok in pairs), pairs, n // k, nats))
      return out

    models = lambda run, task, fields, seeds: (
      [(None, 1.0) for _ in seeds], 9.0
    )  # fmt: skip
    monkeypatch.setattr(on_lists, 'answers', answers)
    monkeypatch.setattr(on_lists, 'models', models)

  return use


@pytest.mark.parametrize('one', [False, True])
def test_tokens_that_saw_each_other_are_above_their_ceiling(
  one, knows_all, tmp_path
):
  knows_all(one)
  given = dict(lists_of=[[4], 300], seeds=[0, 1, 2])
  found = _ceilings(tmp_path, **given)
  assert found.passed != one and found.seeds == 3, found
  assert ('ABOVE' in found.caveat) == one
  assert (tmp_path / 'own' / 'ceilings.png').stat().st_size > 10_000
  shown = _ceilings(tmp_path, shown=['all at once'], **given)
  judged, _, rest = shown.caveat.partition('not judged')
  assert 'all at once' not in judged.partition('ABOVE')[2] and rest


def test_what_is_reported_is_what_is_judged(monkeypatch, tmp_path):
  """Errors of each size: those of 4 would be less with those of 8 added."""
  kept = {4: 60, 8: 50}

  def answers(made, task, operation, n, policy, rows, seed=0, temperature=1):
    del made, task, operation, policy, rows, seed, temperature
    return [(True, [(0.5, i < kept[n])], 1, 0.0) for i in range(100)]

  monkeypatch.setattr(on_lists, 'answers', answers)
  monkeypatch.setattr(on_lists, 'models', lambda *_: ([(None, 1.0)], 9.0))
  for least, most in ((50, '+2.0'), (40, '+2.0'), (62, '+2.4')):
    kept[8] = least
    found = _ceilings(tmp_path, lists_of=[[4, 8], 100])
    assert found.measured == f'{most} at most' and 'ABOVE' not in found.caveat
  kept[8] = 70
  found = _ceilings(tmp_path, lists_of=[[4, 8], 100])
  assert found.measured == '+4.0 at most' and 'of 8: 4.0' in found.caveat


def test_points_have_names_and_those_not_judged_are_hollow(
  knows_all, monkeypatch, tmp_path
):
  knows_all(False)
  figs, lines = [], []
  save = lambda fig, path: figs.append(fig)
  monkeypatch.setattr(canvases.figures, 'save', save)
  given = dict(lists_of=[[4], 30], shown=['all at once'])
  _ceilings(tmp_path, lines.append, **given)
  (fig,) = figs
  names = [t.get_text() for t in fig.legends[0].get_texts()]
  assert names == [
    'one by one', 'all at once (not judged)', 'ceiling of a policy'
  ]  # fmt: skip
  for ax in fig.axes:
    faces = [x.get_markerfacecolor() for x in ax.lines[::2]]
    assert faces[0] != 'none' and faces[1] == 'none'
  table = next(x for x in lines if 'all at once' in x)
  row = next(x for x in table.splitlines() if x.startswith('all at once'))
  assert row.endswith(f'1.0, {on_lists.correlation("replace", [4]):.2f}')


def test_a_model_that_knows_no_replacement_shows_nothing(
  knows_all, monkeypatch, tmp_path
):
  knows_all(False)
  asked = on_lists.answers

  def wrong(made, task, operation, *more):
    found = asked(made, task, operation, *more)
    return [(operation != 'replace', *x[1:]) for x in found]

  given = dict(lists_of=[[4], 300], seeds=[0, 1, 2])
  assert _ceilings(tmp_path, **given).passed
  monkeypatch.setattr(on_lists, 'answers', wrong)
  found = _ceilings(tmp_path, **given)
  assert not found.passed and 'at least 0.0% right' in found.caveat


def test_a_model_that_has_not_learned_shows_nothing(tmp_path):
  found = _ceilings(tmp_path)
  assert not found.passed and 'ABOVE' not in found.caveat
  fewer = canvases.calls(
    _run(tmp_path), task=unmask_cases.TASK, fields=unmask_cases.FIELDS,
    policies=list(POLICIES.values()),
    operations=['copy'], bounds=[3.0, 1.0], lists_of=[4, 8], seeds=[0],
  )  # fmt: skip
  assert not fewer.passed and fewer.measured == '1.0000, 1.0000, -0.8500'
