"""Averages of runs: by hand, of copies, and what has none."""

import dataclasses

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import load
from paraxis.models import build
from paraxis.models import trained
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.train import cli
from paraxis.train.run import merge
from paraxis.train.run import origin as origin_lib
from paraxis.train.run import workdir as workdir_lib

pytestmark = pytest.mark.usefixtures('settings_stay')

MODEL = dict(
  vocab_size=264, d_model=16, num_layers=2, num_heads=2, d_ff=24,
  embedding_init_std=1.0,
)  # fmt: skip


def quiet(line):
  del line


def saved(path, seed, model=(), **data):
  """A run of random parameters -> (its folder, {path: array})."""
  config = schema.view(
    {
      'model': MODEL | dict(model),
      'data': dict(tokenizer='bytes', sequence_length=32) | data,
    }
  )
  built, params = support.untrained(config, seed)
  support.save_run(path, config, built, params, (1, 4))
  return str(path), {p: np.asarray(x) for p, x in params.items()}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  folder = tmp_path_factory.mktemp('runs')
  return [saved(folder / f'{seed}', seed) for seed in range(3)]


def arrays(path, like):
  return origin_lib.Run(str(path)).arrays(list(like))


def test_the_average_of_adapters_learns_everything(runs, tmp_path, monkeypatch):
  """Adapters are merged, and with them goes what they left unfrozen."""
  real = origin_lib.Run.config

  def config(self):
    found = schema.with_value(real(self), 'train.learn', 'head')
    return schema.with_value(found, 'train.lora', schema.Lora(rank=2))

  monkeypatch.setattr(origin_lib.Run, 'config', config)
  merge.write([(path, 0.5) for path, _ in runs[:2]], tmp_path / 'mean', quiet)
  monkeypatch.undo()
  made = origin_lib.Run(str(tmp_path / 'mean')).config().train
  assert not made.learn and not made.lora.rank


def test_the_average_by_hand(runs, tmp_path):
  """Through the command; decoding and --init_from read what it writes."""
  (one, a), (two, b), (three, c) = runs
  out = tmp_path / 'mean'
  words = f'{one}/4:2', two, f'{three}:1'
  assert cli.main(['checkpoint', 'merge', *words, f'--out={out}']) == 0
  found = arrays(out, a)
  for p in a:
    wide = [np.float64(x[p]) for x in (a, b, c)]
    wanted = (2 * wide[0] + wide[1] + wide[2]) / 4
    np.testing.assert_array_equal(found[p], wanted.astype(np.float32))
    assert a[p].std() == 0 or np.abs(found[p] - a[p]).max() > 1e-3
  with load.Checkpoint(str(out), None, quiet) as opened:
    read = opened.parts(schema.view(opened.config()), 'data=8')[1]
  np.testing.assert_array_equal(read['embedding'], found['embedding'])
  source = origin_lib.Run(str(out))
  assert source.about['began'].count(' x ') == 3
  assert f'{one}/4 x 0.5' in source.about['began']
  with pytest.raises(errors.UserError, match='holds imported weights'):
    workdir_lib.check(out, source.config(), False)


def test_copies_give_their_own_bits(runs, tmp_path):
  """Of shares that no number of bits holds."""
  (one, a), (two, b), _ = runs
  merge.write([(one, 1 / 3)] * 3, tmp_path / 'same', quiet)
  found = arrays(tmp_path / 'same', a)
  merge.write([(one, 0.0), (two, 1.0)], tmp_path / 'second', quiet)
  second = arrays(tmp_path / 'second', b)
  for p in a:
    assert found[p].tobytes() == a[p].tobytes(), p
    assert second[p].tobytes() == b[p].tobytes(), p


def test_numbers_of_8_bytes(tmp_path):
  """Without x64, as the command runs: no bit is lost, adapters are merged."""
  config = schema.view(
    {
      'model': MODEL | dict(dtype='float64', param_dtype='float64'),
      'data': dict(tokenizer='bytes'),
      'train': dict(lora=dict(rank=2)),
    }
  )
  with jax.enable_x64(True):
    built = build.build(config, '', devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    params = {
      p: jax.numpy.asarray(rng.normal(size=x.shape))
      for p, x in built.params.items()
    }
    run = str(support.save_run(tmp_path / 'run', config, built, params))
    wanted = trained.merged(params, trained.of(config.train).scale)
    wanted = {p: np.asarray(x) for p, x in wanted.items()}
  merge.write([(run, 0.5), (run, 0.5)], tmp_path / 'mean', quiet)
  for found in arrays(run, wanted), arrays(tmp_path / 'mean', wanted):
    for p, x in wanted.items():
      assert found[p].dtype == np.float64
      np.testing.assert_array_equal(found[p], x, err_msg=p)
  assert not jax.config.jax_enable_x64


def test_adapters_are_merged_first(runs, tmp_path):
  """The average of products is not the product of averages."""
  lora = schema.Lora(rank=2, alpha=4.0)
  config = schema.view({'model': MODEL, 'data': dict(tokenizer='bytes')})
  train = dataclasses.replace(config.train, lora=lora)
  config = dataclasses.replace(config, train=train)
  built = build.build(config, '', devices=jax.devices()[:1])
  made = []
  for seed in range(2):
    with build.use(built):
      params = jax.jit(lambda: built.model.init(jax.random.key(7)))()
    rng = np.random.default_rng(seed)
    params |= {
      p: jax.numpy.asarray(rng.normal(size=x.shape), x.dtype)
      for p, x in params.items()
      if trained.is_adapter(p)
    }
    path = tmp_path / f'{seed}'
    made.append(str(support.save_run(path, config, built, params)))
  merge.write([(made[0], 0.5), (made[1], 0.5)], tmp_path / 'out', quiet)
  plain = [p for p in params if not trained.is_adapter(p)]
  first, second, found = (arrays(p, plain) for p in (*made, tmp_path / 'out'))
  for p in plain:
    wanted = (np.float64(first[p]) + second[p]) / 2
    np.testing.assert_array_equal(found[p], wanted.astype(np.float32))
  assert any(np.abs(first[p] - second[p]).max() > 0.1 for p in plain)
  assert origin_lib.Run(str(tmp_path / 'out')).config().train.lora.rank == 0


def test_what_failed_is_begun_again(runs, tmp_path):
  """Nothing but an empty folder was left."""
  (tmp_path / 'out' / 'checkpoints').mkdir(parents=True)
  merge.write([(runs[0][0], 0.5), (runs[1][0], 0.5)], tmp_path / 'out', quiet)
  assert origin_lib.Run(str(tmp_path / 'out')).about['step'] == 0


@pytest.mark.parametrize('lost', [False, True])
def test_a_folder_of_a_run_keeps_its_files(runs, tmp_path, lost):
  """One that runs before its first save, or whose checkpoints are gone."""
  held = None
  if lost:
    config = origin_lib.Run(runs[0][0]).config()
    workdir_lib.write_config(tmp_path, config)
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n')
  else:
    held = workdir_lib.Lock(tmp_path)
  before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
  with pytest.raises((errors.UserError, errors.IntegrityError)) as caught:
    merge.write([(runs[0][0], 0.5), (runs[1][0], 0.5)], tmp_path, quiet)
  words = 'has lost its checkpoints' if lost else 'in use by another run'
  assert words in str(caught.value)
  assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
  if held:
    held.close()


def test_a_folder_that_is_written_is_locked(runs, tmp_path, monkeypatch):
  """No run begins in it meanwhile, and one that saved first keeps it."""
  given = [(runs[0][0], 0.5), (runs[1][0], 0.5)]
  save, tried = store_lib.Store.save, []

  def saves(self, *named):
    with support.refused('in use by another run'):
      workdir_lib.Lock(tmp_path / 'out')
    tried.append(save(self, *named))

  monkeypatch.setattr(store_lib.Store, 'save', saves)
  merge.write(given, tmp_path / 'out', quiet)
  assert tried
  workdir_lib.Lock(tmp_path / 'out').close()
  monkeypatch.undo()
  real = workdir_lib.Lock

  def late(path):
    (path / 'checkpoints' / '7').mkdir(parents=True)
    return real(path)

  monkeypatch.setattr(workdir_lib, 'Lock', late)
  with support.refused('has checkpoints: name another --out'):
    merge.write(given, tmp_path / 'late', quiet)
  assert not (tmp_path / 'late' / 'config.json').exists()


def test_other_architectures_are_listed(runs, tmp_path, capsys):
  one = runs[0][0]
  wide = saved(tmp_path / 'wide', 0, dict(d_ff=32))[0]
  heads = saved(tmp_path / 'heads', 0, dict(norm_epsilon=1e-3))[0]
  words = saved(tmp_path / 'words', 0, dict(vocab_size=2048))[0]
  other = saved(
    tmp_path / 'other', 0, dict(vocab_size=2048), tokenizer='bpe2048'
  )[0]
  out = tmp_path / 'out'
  for names, texts in (
    ((one, wide), ('params/layers/mlp/up: saved float32(2, 16, 32), wanted '
                   'float32(2, 16, 24)', 'params/layers/mlp/down', '3 of')),
    ((one, heads), ('model.norm_epsilon is 0.001, not 1e-06',)),
    ((words, other), ('its tokenizer is another',)),
    ((one, f'{tmp_path}/none'), ('none', 'no folder')),
    ((one, one), ('named twice',)),
    ((), ('name what to average',)),
  ):  # fmt: skip
    code = cli.main(['checkpoint', 'merge', *names, f'--out={out}'])
    said = capsys.readouterr().err
    assert code == errors.EXIT_USER
    assert all(text in said for text in texts), said
    assert not out.exists()
  taken = cli.main(['checkpoint', 'merge', one, f'--out={runs[1][0]}'])
  assert taken == errors.EXIT_USER
  assert 'has checkpoints' in capsys.readouterr().err
