"""Variants x seeds: trained once, kept by key, refused by name, judged."""

import dataclasses
import functools
import json
import statistics
import types

import claim_cases
import jax
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import lists
from paraxis.train.claims import on_tasks
from paraxis.train.claims import papers
from paraxis.train.claims import sources
from paraxis.train.run import evaluate

# What gains of the seeds say of the claim that they are above 0.1.
JUDGED = [
  ([0.3, 0.4, 0.5], True, 'reproduced'),
  ([0.1, 0.4, 0.7], False, 'direction only'),  # 0.4 +-0.17: above 0, not 0.1
  ([-0.1, 0.4, 0.6], False, 'not reproduced'),  # 0.3 +-0.21
  ([0.04, 0.05, 0.06], False, 'direction only'),
  ([-0.3, -0.4, -0.5], False, 'opposite'),
  ([-0.4, 0.1, -0.1], False, 'not reproduced'),
  ([0.1, 0.1, 0.1], False, 'direction only'),
  ([0.2, 0.3], True, 'direction only'),
  ([-0.2, -0.3], False, 'not reproduced'),
  ([0.2], True, 'direction only'),
  ([-5.0], False, 'not reproduced'),
  ([0.2, 0.3, float('nan')], False, 'not reproduced'),
]


@pytest.mark.parametrize('gains, passed, word', JUDGED)
def test_gains_are_judged(gains, passed, word):
  found = ablation.judged('a', gains, 0.1)
  assert (found.passed, found.verdict) == (passed, word)
  assert found.mean == pytest.approx(statistics.mean(gains), nan_ok=True)
  if len(gains) > 1 and found.mean == found.mean:
    error = statistics.stdev(gains) / len(gains) ** 0.5
    assert found.error == pytest.approx(error)


def test_variants_that_are_equal_to_the_bit_are_not_different():
  found = {'a': [2.0, 2.1, 2.2], 'b': [2.0, 2.1, 2.2], 'c': [2.1, 2.2, 2.3]}
  for compare in (ablation.less, ablation.more):
    equal = compare(found, 'a', 'b')
    assert not equal.passed and equal.verdict == 'not reproduced'
  assert ablation.less(found, 'a', 'c').verdict == 'reproduced'
  assert ablation.more(found, 'a', 'c').verdict == 'opposite'
  assert not ablation.at_most('a', [2.0, 2.0, 2.0], 2.0).passed


def test_a_bound_has_no_opposite():
  found = ablation.at_most('a', [3.0, 3.1, 3.2], 2.0)
  assert found.verdict == 'not reproduced' and found.text == 'a below 2'
  assert ablation.at_most('a', [1.0, 1.1, 1.2], 2.0).verdict == 'reproduced'


def test_a_training_that_takes_too_long_shows_a_direction():
  gains = [0.3, 0.4, 0.5]
  assert ablation.judged('a', gains, 0.1, 1800).verdict == 'reproduced'
  assert ablation.judged('a', gains, 0.1, 1801).verdict == 'direction only'


def _outcome(found, by=0.0, seconds=0.0):
  said = []
  run = claim_cases.run_of()
  run.say = said.append
  finding = ablation.less(found, 'new', 'old', by, seconds)
  out = ablation.outcome(run, found, [finding], 'bits', '9 steps', seconds)
  return out, '\n'.join(said)


def _verdict(outcome, kind='LEARN'):
  return claims.verdict(papers.Claim('a', kind, print, {}, None), outcome)


def test_a_claim_is_told_with_mean_spread_and_error():
  found = {'new': [2.0, 2.1, 2.3], 'old': [2.2, 2.4, 2.4]}  # 0.2 +-0.058
  out, said = _outcome(found)
  assert out.passed and out.seeds == 3 and out.verdict == 'reproduced'
  assert out.measured == '0.2000 +-0.0577' and out.expected == 'new below old'
  rows = [line.split() for line in said.splitlines()]
  assert rows[1] == ['new', '2.1333', '2.0000', '2.3000']
  assert rows[2] == ['old', '2.3333', '2.2000', '2.4000']
  assert '3 seeds' in said and '0.2000 +-0.0577: reproduced' in said
  assert 'new 2.1333 (2.0000 to 2.3000)' in out.caveat
  assert '9 steps' in out.caveat and 'CPU-seconds' not in out.caveat
  slow, _ = _outcome(found, seconds=2000)
  assert slow.verdict == 'direction only' and slow.passed
  assert '2,000 CPU-seconds, more than 1,800' in slow.caveat
  assert max(map(len, said.splitlines())) <= 80


def test_one_seed_is_never_reproduced():
  out, said = _outcome({'new': [2.0], 'old': [2.5]})
  assert out.passed and _verdict(out) == 'direction only, one seed'
  assert 'one seed' in said and '+-' not in out.measured
  with pytest.raises(ValueError, match="'reproduced' of .*seeds=1"):
    _verdict(out._replace(verdict='reproduced'))
  two = out._replace(seeds=2)
  with pytest.raises(ValueError, match='seeds=2'):
    _verdict(two._replace(verdict='reproduced'))
  assert _verdict(two) == 'direction only, two seeds'
  assert _verdict(out._replace(verdict=''), 'EQ') == 'reproduced'


def test_the_worst_of_several_findings_is_the_verdict():
  found = {'a': [1.0, 1.1, 1.2], 'b': [2.0, 2.1, 2.2], 'c': [2.0, 2.1, 2.2]}
  pairs = [ablation.less(found, *p) for p in ('ab', 'bc', 'ba')]
  assert ablation.worst(pairs[:1]) == 'reproduced'
  assert ablation.worst(pairs[:2]) == 'not reproduced'
  assert ablation.worst(pairs) == 'opposite'


class Learner:
  """Trains nothing: the number of a config is its steps and its seed."""

  def __init__(self):
    self.seen = []

  def __call__(self, config, folder, say):
    self.seen.append((folder.name, config.train.steps))
    return {'number': config.train.steps + config.train.seed / 10}


@pytest.fixture
def run(tiny, tmp_path):
  run = claims.Run(tiny.config(), tmp_path / 'run', say=lambda line: None)
  run.mechanism = ('models/norm.py', 'train/claims/budget.py')
  return run


def _train(run, learn, steps=5, seeds=(0, 1), **changes):
  changes = {'train.steps': steps} | changes
  variants = {
    'the old': experiment.fields(run.config, changes),
    'new': experiment.fields(run.config, changes, {'model.d_ff': 96}),
  }
  return ablation.trained(run, variants, seeds, learn)


def test_what_was_trained_is_kept(run):
  learn = Learner()
  first = _train(run, learn)
  names = ['the_old-0', 'new-0', 'the_old-1', 'new-1']
  assert [name for name, _ in learn.seen] == names
  assert ablation.numbers(first, 'number') == {
    'the old': [5.0, 5.1], 'new': [5.0, 5.1]
  }  # fmt: skip
  assert {p.name for p in run.results.iterdir()} == set(names)
  again = _train(run, learn)
  assert ablation.numbers(again, 'number') == ablation.numbers(first, 'number')
  assert len(learn.seen) == 4
  assert ablation.cpu_seconds(again) == ablation.cpu_seconds(first) > 0
  _train(run, learn, seeds=[0, 2])
  assert [name for name, _ in learn.seen[4:]] == ['the_old-2', 'new-2']
  # Where the text lies, and how often a checkpoint is written, are no matter.
  _train(run, learn, **{'checkpoint.every': 7, 'data.cache_dir': 'there'})
  assert len(learn.seen) == 6


def _other_config(run, patch):
  return dict(steps=6), 'train.steps 5 -> 6'


def _other_file(run, patch):
  real = ablation.files.sha256
  changed = lambda path: real(path) + ('x' if path.name == 'norm.py' else '')
  patch.setattr(ablation.files, 'sha256', changed)
  return {}, 'models/norm.py changed'


def _other_kernel(run, patch):
  """What no header names, and every training runs."""
  real = ablation.files.sha256
  changed = lambda path: real(path) + ('x' if path.name == 'xla.py' else '')
  patch.setattr(ablation.files, 'sha256', changed)
  return {}, 'pallas_kernels/attention/xla.py changed'


def _other_mechanism(run, patch):
  run.mechanism = ('models/norm.py', 'train/claims/tasks.py')
  return {}, 'train/claims/budget.py is gone, train/claims/tasks.py is new'


def _other_version(run, patch):
  found = ablation.importlib.metadata.version
  other = lambda name: '9.9' if name == 'jaxlib' else found(name)
  patch.setattr(ablation.importlib.metadata, 'version', other)
  return {}, f'jaxlib {found("jaxlib")} -> 9.9'


def _other_text(run, patch):
  patch.setattr(ablation, '_text', lambda *names: 'other')
  return {}, 'the text of data.path changed'


@pytest.mark.parametrize(
  'change',
  [
    _other_config,
    _other_file,
    _other_kernel,
    _other_mechanism,
    _other_version,
    _other_text,
  ],
)
def test_a_result_of_another_key_is_refused(run, monkeypatch, change):
  learn = Learner()
  _train(run, learn, seeds=[0])
  given, words = change(run, monkeypatch)
  with pytest.raises(errors.UserError, match='^[^\n]*$') as caught:
    _train(run, learn, seeds=[0], **given)
  text = str(caught.value)
  assert str(run.results / 'the_old-0') in text and words in text
  assert '--workdir' in text and '--fresh' in text and len(learn.seen) == 2
  run.fresh = True
  _train(run, learn, seeds=[0], **given)
  assert len(learn.seen) == 4
  _train(run, learn, seeds=[0], **given)  # its own results stay
  assert len(learn.seen) == 4


def test_a_refusal_stays_one_line(run):
  learn = Learner()
  _train(run, learn, seeds=[0])
  many = {f'model.{n}': 2 for n in ('window', 'num_heads', 'max_positions')}
  many |= {'train.steps': 6, 'model.d_model': 64, 'train.batch_size': 4}
  with pytest.raises(errors.UserError, match=', and 2 more') as caught:
    _train(run, learn, seeds=[0], **many)
  assert '\n' not in str(caught.value)


def test_only_trainings_are_removed(run):
  folder = run.results / 'the_old-0'
  folder.mkdir(parents=True)
  (folder / 'mine.txt').write_text('dear')
  run.fresh = True
  with pytest.raises(errors.UserError, match='holds files, but no training'):
    _train(run, Learner())
  (folder / ablation.RECORD).write_text('{"key": ')
  run.fresh = False
  with pytest.raises(errors.UserError, match='training.json is damaged'):
    _train(run, Learner())
  assert (folder / 'mine.txt').exists()


def test_what_a_full_disk_left_is_no_obstacle(run, monkeypatch):
  def full(old, new):
    raise OSError(28, 'No space left on device')

  with monkeypatch.context() as patch:
    patch.setattr(ablation.os, 'replace', full)
    with pytest.raises(OSError, match='No space'):
      _train(run, Learner())
  assert [p.name for p in run.results.rglob('*.*')] == ['training.json.tmp']
  _train(run, learn := Learner())
  assert len(learn.seen) == 4


def test_a_removal_that_is_cut_short_is_no_obstacle(run, monkeypatch):
  def cut(path, ignore_errors=False):
    if path.exists():
      (path / ablation.RECORD).unlink()  # first, and then the process is killed
      raise KeyboardInterrupt

  _train(run, Learner(), seeds=[0])
  (run.results / 'the_old-0' / 'checkpoint').write_text('long')
  run.fresh = True
  with monkeypatch.context() as patch:
    patch.setattr(ablation.shutil, 'rmtree', cut)
    with pytest.raises(KeyboardInterrupt):
      _train(run, Learner(), steps=6, seeds=[0])
  _train(run, learn := Learner(), steps=6, seeds=[0])
  assert len(learn.seen) == 2
  _train(run, Learner(), steps=7, seeds=[0])  # which removes what was left
  assert {p.name for p in run.results.iterdir()} == {'the_old-0', 'new-0'}


def test_a_training_that_was_stopped_goes_on(run):
  def stop(config, folder, say):
    (folder / 'checkpoint').write_text('half')
    raise SystemExit(errors.EXIT_PREEMPTED)

  with pytest.raises(SystemExit):
    _train(run, stop)
  path = run.results / 'the_old-0'
  before = json.loads((path / ablation.RECORD).read_text())
  assert not before['finished'] and before['cpu_seconds'] > 0
  with pytest.raises(errors.UserError, match='train.steps 5 -> 6'):
    _train(run, Learner(), steps=6)
  learn = Learner()
  _train(run, learn)
  assert learn.seen[0] == ('the_old-0', 5) and (path / 'checkpoint').exists()
  after = json.loads((path / ablation.RECORD).read_text())
  assert after['finished'] and after['cpu_seconds'] > before['cpu_seconds']


def test_files_that_no_training_runs_change_no_key(run, monkeypatch):
  learn, real = Learner(), ablation.files.sha256
  _train(run, learn, seeds=[0])
  off = 'huggingface', 'bench', 'certify', 'plot', 'meter', 'decode'
  changed = lambda path: real(path) + ('x' if {*off} & {*path.parts} else '')
  monkeypatch.setattr(ablation.files, 'sha256', changed)
  _train(run, learn, seeds=[0])
  assert len(learn.seen) == 2


@pytest.mark.parametrize('name', ['bpe2048', 'bytes'])
def test_the_shipped_tokenizer_is_in_the_key(run, monkeypatch, name):
  config = schema.with_value(run.config, 'data.tokenizer', name)
  before = ablation.key(config)
  monkeypatch.setattr(
    ablation.tokenizer_lib, 'load',
    lambda name: types.SimpleNamespace(fingerprint='other'),
  )  # fmt: skip
  assert ablation.differences(before, ablation.key(config)) == [
    'data.tokenizer changed'
  ]


def test_a_mixer_of_ones_own_is_part_of_the_key(run, monkeypatch):
  origin = mixers.Origin('/there/mine.py', 'abc')
  monkeypatch.setitem(mixers.OWN, 'F', origin)
  assert ablation.key(run.config)['file']['/there/mine.py'] == 'abc'
  monkeypatch.setitem(mixers.OWN, 'F', mixers.Origin('', 'abc'))  # of a cell
  assert ablation.key(run.config)['file']['mixer F'] == 'abc'
  monkeypatch.delitem(mixers.OWN, 'F')
  monkeypatch.setitem(mixers.OWN, 'Q', origin)
  assert '/there/mine.py' not in ablation.key(run.config)['file']


def test_what_is_measured_is_kept_until_its_file_changes(run, monkeypatch):
  calls = []

  def measure(job, params):
    calls.append((job, params))
    return {'seen': (len(calls), params)}

  monkeypatch.setattr(ablation.Training, 'opened', ('job', 3))
  ask = lambda: _train(run, Learner())['new'][1].measured('seen', measure)
  assert ask() == ask() == {'seen': [1, 3]} and calls == [('job', 3)]
  real = ablation.files.sha256
  mine = lambda path: real(path) + ('x' if 'test_ablation' in str(path) else '')
  monkeypatch.setattr(ablation.files, 'sha256', mine)
  assert ask() == ask() == {'seen': [2, 3]} and len(calls) == 2


@pytest.mark.parametrize(
  'mesh, count', [('context=2', 2), ('stage=2,data=2', 4), ('tensor=4', 4)]
)
def test_a_training_takes_the_devices_of_every_axis(
  run, monkeypatch, mesh, count
):
  config = experiment.laid_out(
    run.config, mesh, {'train.microbatches': 2, 'pipeline.microbatches': 8}
  )
  used, jobs = [], []

  def finish(config, folder, say, make_step, devices):
    used.append((folder, make_step, devices))
    return evaluate.Evaluation(2.5, {}, 10)

  monkeypatch.setattr(claims, 'finish', finish)
  make = lambda whole, text, devices, say: jobs.append((whole, devices))
  monkeypatch.setattr(job_lib, 'make', make)
  monkeypatch.setattr(experiment, 'restored', lambda job, folder: folder)
  found = ablation.trained(run, {'one': config}, [config.train.seed])['one'][0]
  folder, devices = run.results / 'one-0', tuple(jax.devices()[:count])
  assert found.record['numbers'] == {'bits_per_byte': 2.5}
  assert used == [(folder, step_lib.make, devices)]
  _, params = found.opened
  assert params == folder == found.folder
  ((whole, devices_of_job),) = jobs
  assert devices_of_job == devices and whole.train.microbatches == 1
  assert whole.microbatches == config.mesh.stage


def test_runs_of_a_config_and_of_a_knock_out_share_no_folder(run):
  run.results = run.results.with_name('results')
  same, off = run.other(run.config), run.other(run.config, 'off')
  assert same.results == run.results
  assert off.results.name == 'results-off'
  assert same.mechanism == off.mechanism == run.mechanism


def test_the_files_of_a_claim_that_trains_are_in_the_key():
  own = sources.of_claims(functools.partial(on_tasks.train), lists.Lists)
  path = 'train/claims/{}.py'.format
  assert {*map(path, ('on_tasks', 'tasks', 'lists'))} <= {*own}
  assert not {*map(path, ('ablation', 'harness'))} & {*own}
  assert sources.of_claims(ablation.by_loop, Learner()) == ()


def test_the_text_of_every_source_is_in_the_key(run, tmp_path):
  names = [tmp_path / 'a.txt', tmp_path / 'b.txt']
  for file in names:
    file.write_text(f'{file.name} says something. ' * 9)
  spec = f'{names[0]}:.7,{names[1]}:.3'
  config = schema.with_value(run.config, 'data.sources', spec)
  config = schema.with_value(config, 'data.path', 'fixture')
  template = tmp_path / 'chat.jinja'
  template.write_text('one')
  config = schema.with_value(config, 'data.chat_template', str(template))
  before = ablation.key(config)
  names[1].write_text('b.txt says something else. ' * 9)
  template.write_text('other')
  assert ablation.differences(before, ablation.key(config)) == [
    'data.chat_template changed', 'the text of data.path changed'
  ]  # fmt: skip


def test_the_key_names_files_that_exist(run):
  found = ablation.key(run.config, run.mechanism)['file']
  named = (
    'models/decoder.py train/step.py train/loss.py train/updates/optimizers.py'
  )
  assert {*named.split(), *run.mechanism} <= set(found)
  data = dataclasses.replace(run.config.data, path='fixture')
  other = ablation.key(dataclasses.replace(run.config, data=data))
  assert ablation.differences(ablation.key(run.config), other) == [
    'the text of data.path changed'
  ]
