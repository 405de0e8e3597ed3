"""The harness: what it trains, tables and exits with; its checks can fail."""

import pytest

from paraxis.configs.base import errors
from paraxis.train import loop
from paraxis.train.claims import harness as claims
from paraxis.train.claims import held_out
from paraxis.train.claims import papers
from paraxis.train.run import evaluate

CLAIM = """
from paraxis.configs import schema
get_config = schema.default
def claims():
  bound = dict(check='claims.held_out_at_most', bits_per_byte=%s)
  return [('held out', 'LEARN', bound, 1.25)]
"""


def test_a_signal_ends_the_claims_with_75(tiny, tmp_path, monkeypatch):
  result = dict(step=1, stopped='SIGTERM', loss=1.0, evaluation=None)
  monkeypatch.setattr(loop, 'run', lambda *a, **k: result)
  with pytest.raises(SystemExit) as caught:
    claims.finish(tiny.config(), tmp_path, print)
  assert caught.value.code == errors.EXIT_PREEMPTED


def test_the_table_of_claims():
  claim = papers.Claim('a name ' * 9, 'EQ', print, {}, 1.25)
  outcome = claims.Outcome('<= 1e-09', '9.1e-15', 'why ' * 40, True)
  text = claims.table(
    [(claim, outcome), (claim, outcome._replace(passed=False))]
  )
  lines = text.splitlines()
  assert max(map(len, lines)) <= 80 and text.count('why') == 80
  assert lines[2].split()[0] == 'PASS' and '\nFAIL ' in text
  assert lines[2].split()[-4:] == ['<=', '1e-09', '1.25', '9.1e-15']


@pytest.mark.parametrize('bound, code', [('2.4', 0), ('2.2', 1)])
def test_reproduce(tmp_path, monkeypatch, capsys, bound, code):
  path = tmp_path / 'mine.py'
  path.write_text(CLAIM % bound)
  found = evaluate.Evaluation(2.3, {'drama': 2.3}, 10)
  monkeypatch.setattr(held_out, 'trained', lambda run: found)
  assert claims.reproduce(str(path), tmp_path / 'run') == code
  shown = capsys.readouterr().out
  words = ['held out', 'LEARN', f'<= {bound}0', '1.25', '2.3000']
  words += ['all 1 claims hold', 'PASS'] if code == 0 else ['FAILED', 'FAIL']
  assert all(word in shown for word in words)


def _verdict(kind='EQ', **outcome):
  claim = papers.Claim('a', kind, print, {}, None)
  return claims.verdict(claim, claims.Outcome('1', '2', 'why', **outcome))


def test_verdicts_in_words():
  assert _verdict(passed=True) == 'reproduced'
  assert _verdict(passed=False) == 'not reproduced'
  assert _verdict(passed=True, verdict='direction only') == 'direction only'
  assert _verdict(passed=None) == 'SKIPPED (why)'
  for wrong in (
    dict(passed=True, verdict='fine'),
    dict(passed=False, verdict='reproduced'),
  ):
    with pytest.raises(ValueError, match='a: '):
      _verdict(**wrong)


def test_a_number_of_the_paper_that_is_missed_is_said():
  def check(run, *, at_least):
    return claims.Outcome(f'>= {at_least}', '2', 'why', at_least <= 2)

  found = lambda ours, paper: claims.outcome_of(
    None,
    papers.Claim(
      'a', 'SIM', check, dict(at_least=ours), paper, '', dict(at_least=paper)
    ),
  )
  assert found(1, 2) == claims.Outcome('>= 1', '2', 'why', True)
  missed = found(1, 3)
  assert missed.passed and missed.verdict == 'direction only'
  assert missed.caveat == "not the paper's 3; why"
  failed = found(4, 3)
  assert not failed.passed and not failed.verdict and failed.caveat == 'why'


def test_few_seeds_are_said():
  learn = lambda seeds: _verdict('LEARN', passed=True, seeds=seeds)
  assert learn(1) == 'direction only, one seed'
  assert learn(2) == 'direction only, two seeds' and learn(3) == 'reproduced'


def test_what_the_header_admits_is_a_miss():
  row = lambda admits, word, passed=False: (
    papers.Claim('a', 'LEARN', print, {}, 1, admits),
    claims.Outcome('1', '2', 'why', passed, word, 3),
  )
  no, opposite = papers.ADMITTED
  for admits, word, state in (
    ('', '', 'FAIL'), (no, '', 'MISS'), (no, no, 'MISS'),
    (no, 'direction only', 'MISS'), (no, opposite, 'FAIL'),
    (opposite, opposite, 'MISS'), (opposite, no, 'MISS'),
  ):  # fmt: skip
    assert claims.state(*row(admits, word)) == state, (admits, word)
  assert claims.state(*row(no, '', True)) == 'PASS'
  assert claims.state(*row(no, '', None)) == 'SKIP'
  claim, outcome = row(opposite, '')  # a mechanism that does not work
  assert claims.state(claim, outcome._replace(sound=False)) == 'FAIL'
  text, code = claims.summary([row(no, ''), row('', '', True)])
  assert code == 0 and 'all 1 claims hold; 1 NOT REPRODUCED, as' in text
  assert claims.summary([row(no, opposite), row('', '', True)])[1] == 1
  assert 'MISS' in claims.table([row(no, '')])
  assert claims.row(*row(no, ''))['admits'] == no


def test_what_is_not_installed_is_skipped_and_the_rest_shown():
  def lacking(run):
    raise errors.MissingError('no libtpu here')

  good = lambda run: claims.Outcome('1', '1', 'why', True)
  bad = lambda run: claims.Outcome('1', '2', 'why', False)
  rows = lambda *checks: [
    (claim, claims.outcome_of(None, claim))
    for claim in (papers.Claim(c.__name__, 'AOT', c, {}, 1) for c in checks)
  ]
  text = claims.table(rows(lacking, good))
  assert 'SKIP  lacking' in text and 'SKIPPED (no libtpu here)' in text
  assert 'reproduced: why' in text
  text, code = claims.summary(rows(lacking, good))
  assert code == 0 and 'all 1 claims hold; 1 SKIPPED: lacking' in text
  assert claims.summary(rows(lacking))[1] == errors.EXIT_SKIPPED
  text, code = claims.summary(rows(lacking, good, bad))
  assert code == 1 and '1 of 3 claims FAILED' in text and '1 SKIPPED' in text

  def wrong(run):
    raise errors.UserError('too few devices')

  with pytest.raises(errors.UserError):
    rows(wrong)
