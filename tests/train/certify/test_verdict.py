"""`paraxis check --chip`: fits or not, what would, the roofline by hand."""

import dataclasses
import json

import pytest
import support

from paraxis.configs import schema
from paraxis.sharding.meter import target
from paraxis.train import cli
from paraxis.train import loop
from paraxis.train.certify import check
from paraxis.train.certify import verdict

MESH = 'data=4'


def _config(rows=8):
  return schema.Config(
    model=schema.Model(
      vocab_size=64, d_model=32, num_heads=4, d_ff=64, num_layers=2
    ),
    data=schema.Data(sequence_length=64),
    train=schema.Train(batch_size=rows),
  )


@pytest.fixture
def chip(monkeypatch):
  """chip(bytes): v5p with so much memory; fewer changes are tried."""
  monkeypatch.setattr(verdict, 'MOST_GROWTH', 2)
  monkeypatch.setattr(verdict, 'MOVES', verdict.MOVES[:1])
  monkeypatch.setattr(verdict, 'REMAT', ('none', 'full'))

  def make(size):
    small = dataclasses.replace(target.CHIPS['v5p'], hbm=int(size))
    monkeypatch.setitem(target.CHIPS, 'v5p', small)

  return make


def test_what_fits_says_how_much_is_left(chip):
  report = check.check(_config(), MESH)
  chip(report.peak)
  found = verdict.verdict(_config(), MESH, 'v5p', report)
  assert found.fits and not found.tried
  assert 'v5p: fits: 0.00 GiB left' in verdict.text(found)
  chip(report.peak - 1)
  assert not verdict.verdict(_config(), MESH, 'v5p', report).fits


def test_what_would_fit_is_predicted_to(chip):
  """Each change that is named, checked anew as its flags say, does fit."""
  config = _config()
  peak = check.check(config, MESH).peak
  chip(0.75 * peak)
  found = verdict.verdict(config, MESH, 'v5p')
  assert not found.fits and found.fitting
  kinds = ' '.join(t.flags for t in found.fitting)
  assert 'train.remat=' in kinds and 'train.microbatches=' in kinds
  assert '--mesh=' in kinds
  for trial in found.tried:
    changes, mesh = {}, MESH
    for flag in trial.flags.split():
      name, _, value = flag.removeprefix('--').partition('=')
      if name == 'mesh':
        mesh = value
      else:
        name = name.removeprefix('config.')
        old = schema.value(config, name)
        changes[name] = type(old)(value)
    again = check.check(schema.with_values(config, changes), mesh).peak
    assert again == trial.peak
  text = verdict.text(found)
  assert 'DOES NOT FIT' in text and 'fits with --config.train.' in text
  assert max(map(len, text.splitlines())) <= 80


def test_what_nothing_makes_fit(chip):
  chip(10)
  found = verdict.verdict(_config(), MESH, 'v5p')
  assert not found.fitting and len(found.tried) == 9
  least = min(t.peak for t in found.tried)
  assert least < check.check(_config(), MESH).peak
  assert f'none of {len(found.tried)} changes fits' in verdict.text(found)
  # Together with recomputation, when no change alone does.
  assert any('remat=full --mesh=' in t.flags for t in found.tried)


def test_the_least_time_by_hand():
  config = _config()
  report = check.check(config, MESH)
  seconds, why = verdict.times(config, report, 'h100')
  tokens, h100 = 8 * 64, target.CHIPS['h100']
  flops = loop.cost(config).flops * tokens / 4
  assert not why and seconds['compute'] == pytest.approx(flops / h100.flops)
  held = report.held
  moved = 2 * (2 * held['parameters'] + held['activations'])
  moved += 2 * (held['gradients'] + held['optimizer'])
  assert seconds['memory'] == pytest.approx(moved / h100.hbm_bandwidth)
  sent = sum(c.total for c in report.messages)
  assert seconds['links'] == pytest.approx(sent / h100.link)
  # Beyond a host of eight GPUs the network carries what data exchanges.
  wide = check.check(_config(16), 'data=16')
  links = verdict.times(config, wide, 'h100')[0]['links']
  sent = sum(c.total for c in wide.messages)
  assert links == pytest.approx(sent / h100.network)


def test_a_device_of_two_cores_has_half_the_memory():
  assert verdict.parse('v4')[1] == target.CHIPS['v4'].hbm // 2
  assert verdict.parse('v5e')[1] == target.CHIPS['v5e'].hbm


@pytest.mark.parametrize(
  'name, words', [('v5', 'v4, v5e, v5p'), ('H100', "'h100'"), ('b200', 'tpu7x')]
)
def test_an_unknown_chip(name, words):
  with support.refused(f'--chip={name} is not one of', words):
    verdict.run(_config(), chip=name)


@pytest.mark.parametrize('fields, said', [
  ({}, True), ({'capacity_factor': 2.0}, False), ({'count': 0}, False),
])  # fmt: skip
def test_an_exchange_that_the_chip_does_not_use_is_said(fields, said):
  experts = {'count': 4, 'top_k': 2, 'region': 'data'} | fields
  given = {f'model.experts.{name}': value for name, value in experts.items()}
  found = verdict.verdict(schema.with_values(_config(), given), MESH, 'v5p')
  assert found.padded == said
  assert ('a padded exchange of experts' in verdict.text(found)) == said


def test_the_command(capsys, monkeypatch, chip):
  monkeypatch.setattr('paraxis.configs.base.command_line.prepare_devices', id)
  monkeypatch.setattr(verdict, '_tried', lambda *args: [])
  argv = ['check', '--config=quickstart', '--mesh=data=2', '--chip=v5p']
  argv += ['--config.model.num_layers=1']
  assert cli.main(argv) == 0
  shown = capsys.readouterr().out
  assert 'v5p: fits' in shown and 'a model, not measured' in shown
  chip(1000)
  assert cli.main([*argv, '--json']) == 1
  data = json.loads(capsys.readouterr().out)
  assert data['chip']['fits'] is False and data['parameters'] > 1e5
  assert data['chip']['missing_bytes'] == (
    data['peak_bytes_per_chip_estimate'] - 1000
  )
