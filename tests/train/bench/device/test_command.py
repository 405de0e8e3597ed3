"""The order, limits, restarts and documents of `paraxis bench device`.

The parts are those of trial.py: without jax, without figures.
"""

import json
import pathlib
import runpy
import sys
import time

import pytest

from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train.bench import command as bench
from paraxis.train.bench.device import command as device
from paraxis.train.bench.device import parts as device_parts
from paraxis.train.bench.device import report as device_report
from paraxis.train.run import metrics

TRIAL = pathlib.Path(__file__).with_name('trial.py')
ALL = runpy.run_path(str(TRIAL))['ALL']


@pytest.fixture
def use(monkeypatch):
  """use(names): these parts of trial.py, on a CPU that answers."""

  def choose(*names):
    parts = [p for p in ALL if p.name in names]
    monkeypatch.setattr(device_parts, 'PARTS', tuple(parts))
    real = device.command_of

    def command(part, plan, about):
      _, _, _, *rest = real(part, plan, about)
      return [sys.executable, str(TRIAL), *rest]

    monkeypatch.setattr(device, 'command_of', command)

  found = dict(platform='cpu', device='trial', devices=1)
  monkeypatch.setattr(device, 'probe', lambda seconds: found)
  monkeypatch.setattr(device, 'PROBE', 0.0)
  return choose


def run(folder, *flags, minutes=2):
  argv = ['device', f'--out={folder}', f'--minutes={minutes}', '--quick']
  return command_line.run(bench.main, [*argv, *flags])


def states(folder):
  document = json.loads((folder / 'device.json').read_text())
  return {r['part']: r['state'] for r in document['parts']}


def test_what_fails_crashes_or_hangs_costs_itself_alone(use, tmp_path, capsys):
  use('mixed', 'fine')
  assert run(tmp_path) == errors.EXIT_DIFFERENT
  cases = device_report.read(tmp_path, 'mixed')['cases']
  assert {n: s for n, (s, _) in cases.items()} == dict(
    good='ok', wrong='failed', crash='failed', hang='failed', last='ok'
  )
  wrong, crash, hang = (cases[n][1] for n in ('wrong', 'crash', 'hang'))
  assert wrong == 'ValueError: o is wrong by 0.5, the bound is 0.1'
  assert crash == 'exit code 7: an illegal address was encountered'
  assert hang == 'over its limit of 2 seconds'
  assert states(tmp_path) == dict(mixed='failed', fine='ok')
  text = (tmp_path / 'device.md').read_text()
  assert capsys.readouterr().out.strip() == text.strip()
  assert '| mixed | failed | 2 of 5 | ' in text and f'wrong: {wrong}' in text
  assert '| good | TF/s | 1 | 2 | 3 |  |  |' in text
  assert '| > error of o |  | 0.5 | 0.5 | 0.5 | <= 0.1 | - |' in text


def test_a_part_ends_with_its_time_and_without_its_module(use, tmp_path):
  use('endless', 'broken', 'fine')
  assert run(tmp_path) == errors.EXIT_DIFFERENT
  assert states(tmp_path) == dict(endless='failed', broken='failed', fine='ok')
  text = (tmp_path / 'device.md').read_text()
  assert 'its 2 seconds were over; not reached: one, two' in text
  assert 'exit code 1: ImportError: no module named paraxis.missing' in text


def test_a_cut_leaves_rows_and_resume_goes_on(
  use, tmp_path, monkeypatch, capsys
):
  use('fine', 'cut')
  ran = lambda: (tmp_path / 'ran').read_text().count('good')
  text = lambda: (tmp_path / 'device.md').read_text()
  seen = []

  def sleep(seconds):
    time.sleep(seconds)
    record = device_report.read(tmp_path, 'cut')
    if record and record['running'] == 'second':
      seen.append(text())
      if len(seen) > 1:
        raise KeyboardInterrupt

  with monkeypatch.context() as context:
    clock = type('Clock', (), {})()
    clock.sleep, clock.monotonic = sleep, time.monotonic
    context.setattr(device, 'time', clock)
    assert run(tmp_path) == errors.EXIT_INTERRUPTED
  assert states(tmp_path) == dict(fine='ok', cut='running') and ran() == 3
  assert '| cut | running | 1 of 2 |' in seen[-1]  # before it was cut
  assert '| cut | running | 1 of 2 |' in text()
  assert 'running: not reached: second\n\n| what |' in text()

  with monkeypatch.context() as context:  # no time for it: the table stays
    parts = [p._replace(least=(500, 500)) for p in device_parts.PARTS]
    context.setattr(device_parts, 'PARTS', parts)
    context.setattr(device, 'check_budget', lambda *_: 100)
    assert run(tmp_path, '--resume') == errors.EXIT_OK
    assert states(tmp_path) == dict(fine='ok', cut='left out')
    assert '| cut | left out | 1 of 2 |' in text()
    assert 'were left; not reached: second\n\n| what |' in text()

  assert run(tmp_path) == errors.EXIT_USER  # results are there
  assert '--resume keeps them' in capsys.readouterr().err
  (tmp_path / 'go').touch()
  assert run(tmp_path, '--resume') == errors.EXIT_OK
  assert states(tmp_path) == dict(fine='ok', cut='ok')
  assert ran() == 3  # neither a part nor a case ran twice
  assert 'fine: kept' in capsys.readouterr().err

  before = {p.name: p.read_bytes() for p in tmp_path.glob('*.json')}
  monkeypatch.setattr(metrics, 'digest', lambda: 'another')
  capsys.readouterr()
  assert run(tmp_path, '--resume') == errors.EXIT_USER
  assert ' was measured with source ' in capsys.readouterr().err
  # What another source gave is neither joined nor lost.
  after = {p.name: p.read_bytes() for p in tmp_path.glob('*.json')}
  assert ran() == 3 and before == after and before


def test_resume_runs_what_failed_and_keeps_the_rest(use, tmp_path):
  use('mended')
  ran = lambda: (tmp_path / 'ran').read_text().count('good')
  text = lambda: (tmp_path / 'device.md').read_text()
  assert run(tmp_path) == errors.EXIT_DIFFERENT
  assert '| mended | failed | 2 of 3 | ' in text() and ran() == 2
  assert '| > error of o |  | 0.5 | 0.5 | 0.5 | <= 0.1 | - |' in text()
  (tmp_path / 'go').touch()
  assert run(tmp_path, '--resume') == errors.EXIT_OK
  assert states(tmp_path) == dict(mended='ok') and ran() == 2
  assert '| mended | ok | 3 of 3 | ' in text()
  assert '| good | TF/s | 1 | 2 | 3 |  |  |' in text()
  assert text().count('error of o') == 1 and '| 0.05 | <= 0.1 |' in text()


def test_what_does_not_fit_is_left_out_and_no_failure(
  use, tmp_path, monkeypatch
):
  use('fine', 'cut')
  dear = [device_parts.PARTS[0]._replace(least=(500, 500))]
  monkeypatch.setattr(
    device_parts, 'PARTS', (*dear, *device_parts.PARTS[1:])
  )  # fmt: skip
  (tmp_path / 'go').touch()
  assert run(tmp_path) == errors.EXIT_OK
  assert states(tmp_path) == dict(fine='left out', cut='ok')
  text = (tmp_path / 'device.md').read_text()
  assert 'it needs 500 seconds at least, 11' in text  # 118 are left


def test_a_part_leaves_to_later_ones_what_they_need(monkeypatch):
  monkeypatch.setattr(device.time, 'monotonic', lambda: 0.0)
  plan = device.Plan(pathlib.Path(), 102.0, True, 1, 0.0)
  part = lambda least, most=1000: device_parts.Part(
    'x', 'x', '', (least, least), most, 10
  )
  assert plan.left == 100
  assert device._limit(part(5), [part(20), part(30)], plan) == 50
  assert device._limit(part(5), [part(20), part(90)], plan) == 80
  assert device._limit(part(5, 40), [part(20)], plan) == 40
  assert device._limit(part(100), [part(20)], plan) == 100


@pytest.mark.parametrize(
  'argv, message',
  [
    (['device', '--minutes=9'], '--out is missing'),
    (['device', '--out=x'], '--minutes is missing'),
    (['device', '--out=x', '--minutes=0.01'], '0.6 seconds, and the smallest'),
    (['device', '--out=x', '--minutes=9'], 'no accelerator; --quick runs'),
    (['step', '--minutes=9'], '--minutes is for bench device, not step'),
  ],
)
def test_bad_arguments_exit_2(
  argv, message, use, monkeypatch, capsys, tmp_path
):
  monkeypatch.chdir(tmp_path)
  use('fine')
  assert command_line.run(bench.main, argv) == errors.EXIT_USER
  said = capsys.readouterr().err
  assert message in said and said.count('\n') == 1
  assert not pathlib.Path('x').exists()


def test_too_small_a_budget_says_what_would_fit(capsys, tmp_path):
  assert run(tmp_path / 'x', minutes=0.01) == errors.EXIT_USER
  said = capsys.readouterr().err
  assert 'ceilings, needs 18' in said and '--minutes=0.30 would fit it' in said


def test_the_identity_is_of_device_versions_and_commit():
  plan = device.Plan(pathlib.Path(), 60.0, False, 1, 0.0)
  found = dict(platform='gpu', device='NVIDIA H100', devices=2)
  about = device.identity(found, plan)
  assert about['device'] == '2 x NVIDIA H100 (gpu)'
  assert about['jax'] and about['tokamax'] and about['commit']
  quick = device.identity(found, plan._replace(quick=True))
  assert quick != about and quick['sizes'].startswith('--quick')


def test_a_device_that_does_not_answer_is_one_line(monkeypatch):
  monkeypatch.setattr(device, '_PROBE', 'import time; time.sleep(60)')
  with pytest.raises(errors.UserError, match='did not name its devices in 1 s'):
    device.probe(1)
  monkeypatch.setattr(device, '_PROBE', 'raise RuntimeError("no driver")')
  with pytest.raises(errors.UserError, match='RuntimeError: no driver'):
    device.probe(60)
