"""The bench's statistics, targets and candidates; never its times."""

import functools
import itertools
import json
import pathlib

import numpy as np
import pytest

from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train.bench import attention as bench_attention
from paraxis.train.bench import command as bench
from paraxis.train.bench import data as bench_data
from paraxis.train.bench import decode as bench_decode
from paraxis.train.bench import measure
from paraxis.train.bench import own_run as bench_own_run
from paraxis.train.bench import reference
from paraxis.train.bench import report as report_lib
from paraxis.train.bench import startup as bench_startup
from paraxis.train.bench import train as bench_train

SILENT = lambda _: None


class Clock:
  """Time passes only by `spend`."""

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now

  def spend(self, seconds):
    self.now += seconds


def test_interleave_runs_in_turn_and_drops_the_warm_up():
  clock, order = Clock(), []
  costs = {'a': iter([100, 1, 2, 3]), 'b': iter([100, 10, 20, 30])}

  def candidate(name):
    def run():
      order.append(name)
      clock.spend(next(costs[name]))

    return run

  times = measure.interleave({n: candidate(n) for n in costs}, 3, clock)
  assert order == ['a', 'b'] * 4
  assert times == {'a': [1, 2, 3], 'b': [10, 20, 30]}
  assert measure.ratios(times['b'], times['a']) == [10, 10, 10]


def test_a_candidate_may_time_its_parts():
  parts = lambda: {'': 3.0, ': gradient': 2.0}
  times = measure.interleave({'x': parts}, 2, Clock())
  assert times == {'x': [3.0, 3.0], 'x: gradient': [2.0, 2.0]}


def test_settled_waits_for_other_threads():
  clock = Clock()
  work = iter([1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 9.0])
  assert measure.settled(clock, lambda _: clock.spend(next(work))) == 1.5


def test_ratios_need_as_many_rounds():
  with pytest.raises(ValueError):
    measure.ratios([1, 2], [1])


@pytest.mark.parametrize(
  'values, target, least, verdict',
  [
    ([1.0, 1.1, 9.0], 1.0, True, 'met'),
    ([0.99, 1.1, 9.0], 1.0, True, 'within noise'),
    ([0.5, 0.6, 1.0], 1.0, True, 'within noise'),
    ([0.5, 0.6, 0.99], 1.0, True, 'missed'),
    ([0.5, 1.1, 1.2], 1.2, False, 'met'),
    ([0.5, 1.1, 1.21], 1.2, False, 'within noise'),
    ([1.2, 1.3, 9.0], 1.2, False, 'within noise'),
    ([1.21, 1.3, 9.0], 1.2, False, 'missed'),
  ],
)
def test_verdict_is_of_every_round(values, target, least, verdict):
  check = measure.Check('x', values, target, least)
  assert check.verdict == verdict
  assert check._replace(judged=False).verdict == '-'
  # A share of what is possible is judged if it is one.
  above = verdict if max(values) <= 8 else 'above the limit'
  assert check._replace(most=8.0).verdict == above


def _report():
  report = measure.BenchReport('step', 'a setup', measure.CPU)
  report.add({'ours': [1.0, 2.0, 3.0], 'plain': [2.0, 2.0, 2.0]})
  report.check('plain / ours', [2.0, 1.0, 1.67], 1.0)
  report.check('ours / plain', [1.25, 1.3, 1.5], 1.2, least=False)
  report.notes.append('a note')
  return report


def test_text_shows_every_number_and_verdict():
  lines = measure.text(_report()).splitlines()
  row = next(line.split() for line in lines if line.startswith('  ours '))
  assert row == ['ours', 's', '1.00', '2.00', '3.00']
  assert any(line.split()[-3:] == ['>=', '1', 'met'] for line in lines)
  assert any(line.split()[-3:] == ['<=', '1.2', 'missed'] for line in lines)
  assert max(map(len, lines)) < 100 and lines[-1] == '  note: a note'


def test_json_comes_back():
  reports = [_report()]
  text = measure.to_json(reports)
  assert measure.from_json(text) == reports
  (old,) = json.loads(text)  # of before checks had it
  for check in old['checks']:
    del check['most']
  assert measure.from_json(json.dumps([old])) == reports


@pytest.mark.parametrize(
  'x, shown',
  [(0.01234, '0.012'), (1.234, '1.23'), (123.4, '123'), (2e9, '2.00e+09')],
)
def test_number(x, shown):
  assert measure.number(x) == shown


@pytest.mark.parametrize(
  'argv, message',
  [
    (['stp'], "Did you mean 'step'"),
    ([], 'name one of'),
    (['step', 'data'], 'name one of'),
    (['step', '--rounds=0'], 'rounds'),
    (['step', '--round=5'], 'round'),
    (['step', '--json', '--markdown'], 'choose one'),
  ],
)
def test_bad_arguments_exit_2(argv, message, capsys):
  assert command_line.run(bench.main, argv) == errors.EXIT_USER
  assert message in capsys.readouterr().err


def test_help_names_every_bench(capsys):
  assert bench.main(['--help']) == errors.EXIT_OK
  shown = capsys.readouterr().out
  for name in (*bench.BENCHES, '--rounds', '--json', '--quick', '--markdown'):
    assert name in shown
  assert '--out=FILE' in shown and '--resume' in shown
  assert '--peer=NAME:PYTHON' in shown and 'hf_autocast' in shown


def test_output_forms(monkeypatch, capsys):
  monkeypatch.setattr(bench, 'run', lambda *_, **__: _report())
  assert bench.main(['step', '--json']) == errors.EXIT_OK
  assert json.loads(capsys.readouterr().out)[0]['name'] == 'step'
  bench.main(['step', '--markdown', '--rounds=3'])
  shown = capsys.readouterr().out
  assert shown == report_lib.table(_report()) + '\n'
  assert '| plain / ours | 1.00 / 1.67 / 2.00 | >= 1 | met |' in shown
  monkeypatch.setattr(bench, '_in_child', lambda *_, **__: _report())
  bench.main(['all'])
  assert capsys.readouterr().out.count('a setup') == len(bench.BENCHES)


def test_a_run_says_on_what_it_was_measured(monkeypatch):
  monkeypatch.setattr(bench, '_devices', lambda count: None)
  monkeypatch.setattr(
    bench_data, 'data', lambda *_: measure.begin('data', '', '', False)
  )
  report = bench.run('data', 2, True)
  unit, (peak,) = report.rows['peak memory, this process']
  assert unit == 'MiB' and peak > 50
  assert {'cpu', 'cores', 'threads', 'flags', 'jax', 'python'} <= {
    *report.facts
  }
  assert report.facts['cpu'] and report.facts['threads'] >= 1
  assert len(report.dates) == 1 and report.notes[-1].startswith('load ')


FACTS = dict(jax='1', rounds=2)


def _series(made, facts, cut=None, setup='B1', **options):
  """A bench of two comparisons; `made` lists those that ran."""
  with measure.session(facts=facts, **options) as session:
    report = measure.begin('x', setup, measure.CPU, True)
    for part in ('a', 'b'):
      if report.lacks(part):
        made.append(part)
        report.add({part: [1.0, 2.0]})
        report.check(f'{part} / 1', [1.0, 2.0], 1.5)
        report.finish(part)
      if part == cut:
        raise KeyboardInterrupt
    report.finish()
    return session.read()


def test_rows_survive_a_cut_and_are_not_measured_again(tmp_path):
  path, made, lines = tmp_path / 'kept.json', [], []
  with pytest.raises(KeyboardInterrupt):
    _series(made, FACTS, 'a', path=path, say=lines.append)
  assert 'x: a s 1.00 1.50 2.00' in lines  # printed as it came
  (cut,) = measure.from_json(path.read_text())
  assert list(cut.rows) == ['a'] and not cut.complete
  options = dict(path=path, resume=True, say=lines.append)
  (whole,) = _series(made, FACTS, **options)
  assert made == ['a', 'b'] and list(whole.rows) == ['a', 'b']
  assert whole.complete and len(whole.checks) == 2
  with pytest.raises(measure.KeptError):
    _series(made, FACTS, **options)
  assert made == ['a', 'b']


def _rounds(calls, last, **options):
  """A bench of two comparisons of the same name, cut after `last` calls."""

  def call(name):
    calls.append(name)
    if len(calls) == last:
      raise KeyboardInterrupt
    return {'': float(len(calls))}

  with measure.session(facts=FACTS, **options) as session:
    report = measure.begin('x', 'B1', measure.CPU, True)
    report.notes.append('once')
    made = {n: functools.partial(call, n) for n in 'ab'}
    for part in ('first', 'second'):
      if report.lacks(part):
        times = measure.interleave(made, 2)
        report.add({f'{part} {n}': t for n, t in times.items()})
        report.finish(part)
    report.finish()
    return session.read()


@pytest.mark.parametrize('last', range(1, 13))
def test_rounds_survive_a_cut(last, tmp_path):
  """Wherever it is cut: whole rounds are kept, the others are made."""
  path, calls = tmp_path / 'kept.json', []
  with pytest.raises(KeyboardInterrupt):
    _rounds(calls, last, path=path)
  kept = measure.from_json(path.read_text())[0] if path.exists() else None
  rounds = max((last - 1) % 6 // 2 - 1, 0)  # of three: a warm-up, two rounds
  if kept:
    assert [len(t) for x in kept.cut.values() for t in x.values()] == (
      [rounds] * 2 if rounds else []
    )
    assert not kept.complete
  again = []
  options = dict(path=path, resume=True, say=SILENT)
  (whole,) = _rounds(again, 0, **options)
  warm, done = 2, 6 * ((last - 1) // 6)
  assert len(again) == 12 - done - 2 * rounds
  assert again[:warm] == ['a', 'b']
  each = {what: values for what, (_, values) in whole.rows.items()}
  assert {what: len(v) for what, v in each.items()} == dict.fromkeys(
    ('first a', 'first b', 'second a', 'second b'), 2
  )
  if rounds:  # the first round is the one measured before the cut
    part = ('first', 'second')[done // 6]
    assert each[f'{part} a'] == [done + 3.0, 3.0]
  assert whole.notes == ['once'] and not whole.cut


@pytest.mark.parametrize(
  'other', [dict(facts=FACTS | dict(jax='2')), dict(setup='B2')]
)
def test_rows_of_other_sizes_or_versions_are_measured_anew(other, tmp_path):
  path, made, lines = tmp_path / 'kept.json', [], []
  _series(made, FACTS, path=path)
  options = dict(facts=FACTS) | other
  _series(made, path=path, resume=True, say=lines.append, **options)
  assert made == ['a', 'b'] * 2
  what = 'setup' if 'setup' in other else 'jax'
  assert f'x: measured anew, its {what} differ; ' in lines[0]
  (before,) = measure.from_json((tmp_path / 'kept.json.before').read_text())
  assert before.complete and before.facts == FACTS


def test_what_is_measured_anew_is_kept_of_every_bench(tmp_path):
  path, old = tmp_path / 'kept.json', _report()
  path.write_text(measure.to_json([old]))
  _series([], FACTS, path=path, resume=True, say=SILENT)
  newer = dict(facts=FACTS | dict(jax='2'), path=path, resume=True, say=SILENT)
  _series([], **newer)
  with measure.session(**newer) as session:
    measure.begin(old.name, old.setup, old.clock, old.judged).finish()
    assert {r.facts['jax'] for r in session.read()} == {'2'}
  before = measure.from_json((tmp_path / 'kept.json.before').read_text())
  assert {r.name: r.facts for r in before} == {'x': FACTS, old.name: {}}


def test_a_file_keeps_the_other_benches(tmp_path):
  path = tmp_path / 'kept.json'
  path.write_text(measure.to_json([_report()]))
  found = _series([], FACTS, path=path, resume=True, say=SILENT)
  assert [r.name for r in found] == ['step', 'x']


@pytest.mark.parametrize(
  'text, argv, message',
  [
    ('[]', ['--out={}'], 'exists: --resume continues it'),
    (None, ['--resume'], '--resume needs --out=FILE'),
    ('{]', ['--out={}', '--resume'], 'holds no reports'),
    (None, ['--out={}/x/y.json'], 'no such folder'),
    (None, ['--draft=x'], 'bench step takes no --draft'),
    (
      None,
      ['--tune={}', '--quick', '--json'],
      '--tune takes no --quick, --json',
    ),
  ],
)
def test_bad_files_exit_2(text, argv, message, tmp_path, capsys):
  path = tmp_path / 'kept.json'
  if text:
    path.write_text(text)
  argv = [a.format(path) for a in argv]
  assert command_line.run(bench.main, ['step', *argv]) == errors.EXIT_USER
  assert message in capsys.readouterr().err


# name in reference.py -> path in a layer of ours
PATHS = dict(
  q='attention/query', k='attention/key', v='attention/value',
  o='attention/output', n1='attention_norm/scale', n2='mlp_norm/scale',
  gate='mlp/gate', up='mlp/up', down='mlp/down',
)  # fmt: skip


def test_both_candidates_take_the_same_step():
  """Same parameters and batch -> the same loss and embedding gradient."""
  import jax

  c = bench_train.config(True)
  ticks = itertools.count()
  ours = bench_train.Ours(c, 'data=1', lambda: next(ticks))
  params = jax.device_get(ours._state.params)
  m, host = c.model, bench_train.batch(c)
  plain = reference.init(m, jax.random.key(0), True)
  for name, path in PATHS.items():
    like = plain['layers'][name]
    plain['layers'][name] = params[f'layers/{path}'].reshape(like.shape)
  plain |= {name: params[name] for name in ('embedding', 'head')}
  plain['norm'] = params['norm/scale']
  loss, gradient = jax.value_and_grad(
    lambda p: reference.loss(m, p, host.tokens, host.targets)
  )(plain)
  with ours.job.context():
    our_loss, ours_gradient, _ = ours._grads(ours._state.variables, ours._batch)
  np.testing.assert_allclose(our_loss, loss, rtol=1e-5)
  np.testing.assert_allclose(
    ours_gradient['embedding'], gradient['embedding'], atol=1e-5
  )
  assert set(ours.run()) == {'', ': gradient', ': update'}
  assert ours.compile()[''] > 0 and ours.temporary() > [0]


def test_plain_candidate_learns():
  plain = bench_train.PlainJax(bench_train.config(True), True, Clock())
  before = np.asarray(plain._state[0]['embedding'])
  assert plain.run() == {'': 0.0}
  assert np.abs(np.asarray(plain._state[0]['embedding']) - before).max() > 0


def test_bfloat16_stands_in_the_rounds_of_a_step(monkeypatch):
  """Half of float32 where the processor has AMX, which this one may have."""
  monkeypatch.setattr(bench_train, 'amx', lambda: True)
  report = bench_train.step(1, True, SILENT)
  assert 'step, ours, bfloat16' in report.rows
  (check,) = (c for c in report.checks if 'bfloat16' in c.what)
  assert check.what == (
    'step: time of ours, bfloat16 / ours, default (unroll=1)'
  )
  assert check.bound == '<= 0.5' and bench_train.NARROW[False] == 1


def test_attention_bench():
  report = bench_attention.attention(1, True, SILENT)
  memory = {k: v for k, (u, v) in report.rows.items() if u == 'MiB'}
  dense, ours, *narrow, long = memory.values()
  assert 0 < ours[0] < dense[0] and 0 < narrow[1][0] and ours[0] < long[0]
  assert [c.verdict for c in report.checks] == ['-'] * 2
  assert report.parts == ['float32', 'bfloat16', 'float32 T16384']
  gaps = [float(note.split()[-1]) for note in report.notes]
  assert gaps[0] < 1e-4 < gaps[1] < 0.05


def test_decode_bench():
  report = bench_decode.decode(1, True, SILENT)
  batches = len(bench_decode.QUICK)
  assert len(report.checks) == 2 + 2 + 2 * batches + 1
  assert len(report.parts) == 1 + batches + 1
  for batch in bench_decode.QUICK:
    assert f'batch {batch}: {bench_decode.NARROW}' in report.rows
  first = 'first token and next, ours'
  assert report.rows[f'{first}, first'][1] < report.rows[first][1]
  assert all(min(c.values) > 0 for c in report.checks)
  whole, prompt = (c.values for c in report.checks[:2])
  for found, part in ((whole, ''), (prompt, ', first')):  # the same work
    ours, plain = (
      report.rows[f'first token and next, {name}{part}'][1]
      for name in ('ours', 'plain JAX')
    )
    assert found == measure.ratios(ours, plain)
  shares = [c for c in report.checks if 'byte limit' in c.what]
  assert [c.most for c in shares] == [1.0, 1.0]
  assert report.rows['byte limit, batch 1'][0] == 'tokens/s'
  assert 'after 64 tokens: the prompt itself' in report.rows


def test_prefill_bench():
  report = bench_decode.prefill(1, True, SILENT)
  memory = [v for unit, v in report.rows.values() if unit == 'MiB']
  assert len(memory) == 5 and min(memory) > [0]
  assert [c.target for c in report.checks] == [1.0, 0.4, 1.0]
  assert report.parts == ['64 tokens', '128 tokens']


def test_plain_decoding_continues_a_plain_prompt():
  """A prompt, then a token, give the logits of one pass over all of them."""
  import jax
  import jax.numpy as jnp

  m = bench_train.config(True).model
  params = reference.init(m, jax.random.key(0), False)
  tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, m.vocab_size)

  def logits(tokens):
    x = params['embedding'][tokens]
    for p in params['layers']:
      x = reference.layer(m, x, p)
    return reference.rms(x[:, -1], params['norm']) @ params['head'].T

  found, cache = reference.prefill(m, params, tokens[:, :8], blocks=4)
  np.testing.assert_allclose(found, logits(tokens[:, :8]), atol=1e-5)
  wide = ((0, 0), (0, 0), (0, 3), (0, 0))
  cache = jax.tree.map(lambda x: jnp.pad(x, wide), cache)
  found, _ = reference.decode_step(m, params, cache, tokens[:, 8], jnp.int32(8))
  np.testing.assert_allclose(found, logits(tokens), atol=1e-5)
  assert np.abs(found - logits(tokens[:, :8])).max() > 1e-3


def test_the_embedding_is_not_read():
  params = dict(embedding=np.zeros((8, 4)), head=np.zeros((8, 4), np.float32))
  assert bench_decode.bytes_per_token(params) == 128
  del params['head']  # the embedding is the head
  assert bench_decode.bytes_per_token(params) == 256


def test_own_run_bench(monkeypatch):
  monkeypatch.setattr(bench_own_run, 'STEPS', 3)
  report = bench_own_run.own_run(1, True, SILENT)
  assert [c.bound for c in report.checks] == ['<= 1.5', '<= 0.5', '<= 0.75']
  assert all(min(c.values) > 0 for c in report.checks)


def test_what_own_run_compares(tmp_path, monkeypatch):
  """The same numbers are saved, every step is logged, adapters learn."""
  from paraxis.train.run import metrics
  from paraxis.train.run import origin as origin_lib

  monkeypatch.setattr(bench_own_run, 'STEPS', 3)
  size = bench_own_run.write(tmp_path / 'theirs', bench_own_run.QUICK)
  kept = []
  monkeypatch.setattr(bench_own_run.shutil, 'rmtree', kept.append)
  made = bench_own_run.importing(tmp_path, Clock())
  assert made['checkpoint import']() == {'': 0.0}
  run = origin_lib.Run(str(kept[0]))
  arrays = run.arrays([p.removeprefix('params/') for p in run._saved])
  assert sum(x.nbytes for x in arrays.values()) == size
  c = bench_train.config(True)
  with bench_own_run.logging(c, tmp_path, Clock()) as candidates:
    for call in candidates.values():
      call()
  assert list(metrics.read(tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize('packing', ['first_fit', 'concat_split'])
def test_data_candidates_lose_nothing(packing):
  made = bench_data.corpus(bench_data.lengths(100))
  clock = Clock()
  _, used, fill = bench_data.ours(made, 256, packing, clock)
  pairs = int((made.lengths - 1).sum())
  dropped = pairs - used  # rows of a last, incomplete batch
  assert 0 <= dropped < bench_data.ROWS * 256 and fill > 0.9
  _, used, fill = bench_data.grains(made, 256, clock)
  assert len(made.tokens) - used < bench_data.ROWS * 256 and fill > 0.8


def test_startup_arguments_are_those_of_train(tmp_path):
  from paraxis.train import cli

  argv = bench_startup.train_arguments(
    bench_startup.QUICK, tmp_path / 'tokens', tmp_path / 'run'
  )
  values, config, left = command_line.parse(argv, cli.COMMANDS['train'].flags)
  assert not left and values.devices == 1 and config.train.steps == 1
  for name, value in bench_startup.QUICK.items():
    assert config.model[name] == value


@pytest.mark.parametrize('form', ['plain', 'ours'])
def test_startup(form, tmp_path):
  seconds, phases = bench_startup.start(
    tmp_path, bench_startup.QUICK, form, True, True
  )
  assert seconds > 0 and all(v >= 0 for v in phases.values())
  assert {'imports', 'state', 'compile', 'rest'} <= set(phases)


def test_startup_names_a_child_that_fails():
  with pytest.raises(RuntimeError, match='startup of ours: exit'):
    bench_startup.child('ours', ['--config=none'], {})


def test_modules_of_all_benches_exist():
  folder = pathlib.Path(bench.__file__).parent
  for name, (module, *_) in bench.BENCHES.items():
    text = (folder / f'{module}.py').read_text(encoding='utf-8')
    assert f'\ndef {name}(rounds, quick, say)' in text


def test_layouts_are_compiled_in_the_time_of_compiling(monkeypatch):
  """Not of what is built and drawn before."""

  class Ours:
    built = 3.0

    def __init__(self, *_):
      pass

    def run(self):
      return {'': 1.0}

  monkeypatch.setattr(bench_train, 'Ours', Ours)
  rows = bench_train.layouts(1, True, SILENT).rows
  found = {k: x for k, (_, x) in rows.items() if k.startswith('compile, ')}
  assert found == {f'compile, {name}': [3.0] for name in bench_train.LAYOUTS}
