"""Claims about held-out text: bounds, what is trained, and its table."""

import math

import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.train import loop
from paraxis.train.claims import ablation
from paraxis.train.claims import harness as claims
from paraxis.train.claims import held_out
from paraxis.train.data import baselines
from paraxis.train.plot import losses as plot
from paraxis.train.run import evaluate

BASE = baselines.Baselines(
  100, 2.587, 2.363, 2.002, {'drama': 3.463, 'translation': 1.770}
)


@pytest.fixture
def run(tiny, tmp_path, monkeypatch):
  monkeypatch.setattr(held_out, '_baselines', lambda *given: BASE)
  monkeypatch.setattr(plot, 'draw', lambda folders, path: path)
  config = schema.with_value(tiny.config(), 'train.eval_batches', 0)
  return claims.Run(config, tmp_path / 'run', say=lambda text: None)


@pytest.fixture
def reach(run, monkeypatch):
  """reach(check, bits): the check's outcome after a training to those bits."""

  def after(check, bits, translation=2.0, **given):
    domains = {'drama': 2.4, 'translation': translation}
    found = evaluate.Evaluation(bits, domains, 1000)
    monkeypatch.setattr(held_out, 'trained', lambda run: found)
    return check(run, **given)

  return after


def test_bounds(reach):
  good, bad = (
    reach(held_out.at_most, b, bits_per_byte=2.40) for b in (2.40, 2.41)
  )
  assert good.passed and not bad.passed
  assert good.expected == '<= 2.40' and bad.measured == '2.4100'
  assert not reach(held_out.at_most, math.nan, bits_per_byte=9.0).passed
  good, bad = (reach(held_out.below_gzip, b) for b in (2.5, 2.6))
  assert good.passed and not bad.passed
  assert 'gzip wins in translation' in good.caveat
  assert '2.363' in good.caveat and '2.002' in good.caveat
  won = reach(held_out.below_gzip, 2.5, 1.5)
  assert 'no domain is lost' in won.caveat and 'may lose' in won.caveat
  good, bad = (reach(held_out.below_xz, b) for b in (2.36, 2.37))
  assert good.passed and not bad.passed and good.expected == '< 2.363'
  assert '2.002' in good.caveat


@pytest.mark.parametrize('check', (held_out.below_gzip, held_out.below_xz))
def test_baselines_of_other_text_are_refused(run, reach, check):
  for name, value in (('train.eval_batches', 1), ('data.sources', 'a.txt:1')):
    run.config = schema.with_value(schema.Config(), name, value)
    with pytest.raises(errors.UserError, match=f'but {name} .*={value!r}'):
      reach(check, 1.0)


def test_the_domain_table():
  found = evaluate.Evaluation(2.5, {'drama': 2.4, 'translation': 2.0}, 1000)
  lines = held_out.domain_table(found, BASE).splitlines()
  assert lines[1].split() == ['drama', '2.400', '3.463']
  assert lines[2].endswith('1.770  gzip is better')
  assert lines[3].split() == ['all', '2.500', '2.587']
  assert '2.363' in lines[4] and '2.002' in lines[4]
  without = BASE._replace(xz=math.nan)
  assert 'xz' not in held_out.domain_table(found, without)


def test_gzip_is_compared_only_on_the_same_text_of_a_bearable_size(monkeypatch):
  config = schema.Config()
  part = schema.Config(train=schema.Train(eval_batches=1))
  small = evaluate.Evaluation(2.0, {'code': 2.0}, 100)
  large = small._replace(n_bytes=held_out.COMPARED_BYTES + 1)
  assert 'leaves text out' in held_out.against_gzip(part, small)
  assert 'are more than 20,000,000' in held_out.against_gzip(config, large)
  assert 'code' in held_out.against_gzip(config, small)
  monkeypatch.setattr(held_out, 'READ_BYTES', 1000)
  assert 'are more than 1,000' in held_out.against_gzip(config, small)


def test_the_text_is_where_the_run_read_it(tmp_path, monkeypatch):
  """Below home, which the run has as an absolute path."""
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'a.md').write_text('once ' * 99)
  (tmp_path / 'b.md').write_text('then ' * 99)
  config = schema.with_value(schema.Config(), 'data.path', '~/*.md')
  found = evaluate.Evaluation(2.0, {'a': 2.0}, 100)
  monkeypatch.setattr(held_out, 'READ_BYTES', 100)
  assert 'files of 990 bytes' in held_out.against_gzip(config, found)


def test_a_text_that_went_away_is_no_error_of_a_run(tmp_path, monkeypatch):
  path = tmp_path / 'a.txt'
  path.write_text('once ' * 99)
  config = schema.with_value(schema.Config(), 'data.path', str(path))
  small = evaluate.Evaluation(2.0, {'a': 2.0}, 100)
  text = held_out.against_gzip(config, small)  # one document: none is held out
  assert text.startswith('gzip -9: not compared, data.path=')
  path.unlink()
  text = held_out.against_gzip(config, small)
  assert text.startswith('gzip -9: not compared, ') and 'a.txt' in text


def test_a_text_that_is_written_anew_is_compressed_anew(tmp_path):
  path, found = tmp_path / 'a.jsonl', []
  config = schema.with_value(schema.Config(), 'data.path', str(path))
  for first in (1, 10**9, 1):
    lines = (f'{{"text": "{i * i}"}}\n' for i in range(first, first + 99))
    path.write_text(''.join(lines))
    found.append(held_out.baselines(config, xz=False))
  assert found[0].n_bytes < found[1].n_bytes and found[0][:2] == found[2][:2]


def test_training_happens_once_under_a_key(run, monkeypatch):
  """A second claim takes what lies there, other code does not."""
  result, ran, said = evaluate.Evaluation(2.3, {'song': 2.3}, 10), [], []

  def train(config, folder, say, **how):
    ran.append(config.train.seed)
    folder.mkdir(exist_ok=True)
    return dict(stopped='', evaluation=result)

  monkeypatch.setattr(loop, 'run', train)
  run.say = said.append
  found = held_out.trained(run)
  assert found == result == held_out.trained(run)
  assert ran == [run.config.train.seed]
  assert 'gzip -9' in '\n'.join(said) and 'xz -9e' in '\n'.join(said)
  assert said[-1] == f'wrote {run.results / plot.NAME}'
  monkeypatch.setattr(ablation, 'VERSIONS', ('jax',))
  with pytest.raises(errors.UserError, match='holds another training'):
    held_out.trained(run)
