"""Weights of other programs by the commands that a user types."""

import json

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models import build
from paraxis.models.huggingface import files as files_lib
from paraxis.models.huggingface import source
from paraxis.models.text import tokenizer as tokenizer_lib
from paraxis.train import cli
from paraxis.train import exchange
from paraxis.train.run import origin as origin_lib

pytestmark = pytest.mark.usefixtures('settings_stay')

MODEL = dict(d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=24)
STILL = ['optimizer.learning_rate=1e-30', 'optimizer.weight_decay=0']
SHORT = ['train.steps=1', 'train.eval_batches=0', 'data.sequence_length=32']


def quiet(line):
  del line


def _folder(at, tokenizer, rows):
  """A folder of Hugging Face, of a model with so many rows."""
  config = schema.view(
    {'model': MODEL | dict(vocab_size=rows), 'data': dict(tokenizer=tokenizer)}
  )
  built, params = support.untrained(config)
  support.save_run(at / 'run', config, built, params)
  exchange.send(str(at / 'run'), at / 'hf', say=quiet)
  (at / 'hf' / 'README.md').write_text('---\nlicense: apache-2.0\n---\n')
  return at / 'hf'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """With a tokenizer.json."""
  return _folder(tmp_path_factory.mktemp('whole'), 'bpe2048', 2048)


@pytest.fixture(scope='module')
def bare(tmp_path_factory):
  """With the files of an older tokenizer, which are not read."""
  made = _folder(tmp_path_factory.mktemp('bare'), 'bytes', 264)
  assert not (made / files_lib.TOKENIZER).exists()
  for name in files_lib.OTHER_TOKENIZERS[:2]:
    (made / name).write_text('{}')
  return made


def _train(tiny, weights, workdir, *fields, flags=()):
  # The tokenizer of the file is named, as that of a plain config is not.
  fields = [f'--config.{x}' for x in (*SHORT, *fields)]
  argv = ['train', f'--config={tiny.file}', '--mesh=data=8', *fields, *flags]
  argv += [f'--workdir={workdir}'] if workdir else []
  return cli.main([*argv, f'--init_from={weights}'])


def _decode(weights, *flags):
  argv = ['decode', f'--weights={weights}', '--prompt=The', '--json', *flags]
  return cli.main([*argv, '--max_new_tokens=2'])


def _line(capsys):
  """The one line of an error."""
  err = capsys.readouterr().err.splitlines()
  assert len(err) == 1, err
  return err[0]


def _arrays(run):
  found = origin_lib.Run(str(run), say=quiet)
  model = build.build(found.config(), 'data=1', devices=jax.devices()[:1])
  return found.arrays(list(model.params))


def test_imported_and_exported(folder, tmp_path, capsys):
  """Every tensor is the one that was there, and so is the tokenizer."""
  run, out = tmp_path / 'run', tmp_path / 'out'
  argv = ['checkpoint', 'import', str(folder), f'--workdir={run}']
  assert cli.main(argv) == 0
  shown = capsys.readouterr().out
  assert 'licence of the weights: apache-2.0' in shown and str(run) in shown
  argv = ['checkpoint', 'export', f'--checkpoint={run}', f'--out={out}']
  assert cli.main(argv) == 0
  assert 'llama' in capsys.readouterr().out
  theirs, ours = (source.Source(f).files for f in (folder, out))
  assert set(theirs.shapes) == set(ours.shapes)
  for name in theirs.shapes:
    np.testing.assert_array_equal(theirs.read(name), ours.read(name))
  assert ours.tokenizer() == theirs.tokenizer() != ''
  assert ours.licence == 'apache-2.0'
  assert cli.main(argv) == errors.EXIT_USER
  assert 'is not empty' in _line(capsys)


def test_a_run_begins_with_a_folder(tiny, folder, tmp_path, capsys):
  """The model is the folder's, whatever the config says, and its values."""
  fields = [*STILL, 'data.tokenizer=bpe2048']
  assert _train(tiny, folder, tmp_path / 'run', *fields) == 0
  shown = capsys.readouterr().out
  assert shown.count('licence of the weights: apache-2.0') == 1
  assert f'data.tokenizer: the one of {folder}' in shown
  wanted = _arrays(folder.parent / 'run')
  for path, x in _arrays(tmp_path / 'run').items():
    np.testing.assert_allclose(x, wanted[path], rtol=0, atol=1e-6)
  kept = origin_lib.Run(str(tmp_path / 'run')).config()
  assert kept.model.d_model == 16 and kept.model.vocab_size == 2048


def test_a_dry_run_of_a_folder(tiny, folder, tmp_path, capsys):
  fields = ['data.tokenizer=bpe2048']
  flags = ['--dry_run']
  assert _train(tiny, folder, '', *fields, flags=flags) == 0
  shown = capsys.readouterr().out
  total = sum(x.size for x in _arrays(folder.parent / 'run').values())
  assert f'{total:,} parameters' in shown and 'predicted' in shown
  assert 'licence of the weights: apache-2.0' in shown
  run = tmp_path / 'run'
  assert _train(tiny, folder, run, *fields, flags=flags) == 0
  assert not run.exists()


def test_a_rate_of_a_model_from_scratch_is_said(tiny, folder, capsys):
  """Once, and not of the config that is for tuning."""
  common = ['train', f'--init_from={folder}', '--dry_run', '--mesh=data=8']
  common += [f'--config.data.path={tiny.text}']
  for config, rate, lines in (
    (tiny.file, '3e-3', 1),
    ('configs/finetune.py', '2e-5', 0),
  ):
    argv = [*common, f'--config={config}', '--config.data.tokenizer=bpe2048']
    argv += [f'--config.optimizer.learning_rate={rate}'] if lines else []
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    assert shown.count('optimizer.learning_rate=0.003: ') == lines
    assert '--config=configs/finetune.py' in shown or not lines


def test_decoding_a_folder(folder, capsys):
  """The tokens of the run that it was; the licence is shown once."""
  assert _decode(folder) == 0
  out, err = capsys.readouterr()
  assert err.count('licence of the weights: apache-2.0') == 1
  argv = ['decode', f'--checkpoint={folder.parent / "run"}', '--prompt=The']
  assert cli.main([*argv, '--json', '--max_new_tokens=2']) == 0
  mine = json.loads(capsys.readouterr().out)['samples'][0]
  assert json.loads(out)['samples'][0]['tokens'] == mine['tokens']
  assert len(mine['tokens']) == 2


NONE = ['vocab.json and merges.txt', 'no tokenizer.json', 'save_pretrained']


def test_an_import_without_tokenizer(bare, tmp_path, capsys):
  """Refused, with both ways out; taken where one is named, and said."""
  run = tmp_path / 'run'
  argv = ['checkpoint', 'import', str(bare), f'--workdir={run}']
  assert cli.main(argv) == errors.EXIT_USER
  out, err = capsys.readouterr()
  assert err.count('\n') == 1 and all(x in err for x in NONE)
  assert '--tokenizer=' in err and not (run / 'checkpoints').exists()
  assert cli.main([*argv, '--tokenizer=bpe2048']) == errors.EXIT_USER
  assert '2048 ids, the weights 264' in _line(capsys)
  assert cli.main([*argv, '--tokenizer=bytes']) == 0
  out = capsys.readouterr().out
  assert f'data.tokenizer: bytes; {bare} has none' in out
  found = origin_lib.Run(str(run)).config().data.tokenizer
  assert tokenizer_lib.load(found).name == 'bytes'


def test_a_run_from_weights_without_tokenizer(tiny, bare, tmp_path, capsys):
  flags = ['--dry_run']
  fields = ['data.tokenizer=bpe2048']  # the default, which nobody named
  assert _train(tiny, bare, '', *fields, flags=flags) == errors.EXIT_USER
  line = _line(capsys)
  assert all(x in line for x in NONE) and '2048 ids, the weights 264' in line
  assert '--config.data.tokenizer=' in line
  assert _train(tiny, bare, tmp_path / 'run') == 0  # tiny.file names bytes
  shown = capsys.readouterr().out
  assert f'data.tokenizer: bytes; {bare} has none' in shown


def test_decoding_without_tokenizer(bare, capsys):
  assert _decode(bare) == errors.EXIT_USER
  err = capsys.readouterr().err.splitlines()[-1]
  assert all(x in err for x in [*NONE, '--config.data.tokenizer='])
  assert _decode(bare, '--config.data.tokenizer=bytes') == 0
  out, err = capsys.readouterr()
  assert len(json.loads(out)['samples'][0]['tokens']) == 2
  assert f'tokenizer bytes; {bare} has none' in err
  assert _decode(bare, '--config.data.tokenizer=bpe2048') == errors.EXIT_USER
  assert '2048 ids, the weights 264' in capsys.readouterr().err


def test_an_export_without_tokenizer_says_so(bare, tmp_path, capsys):
  """Of bytes, and of ids of which nobody knows the text."""
  run = tmp_path / 'run'
  argv = ['checkpoint', 'import', str(bare), f'--workdir={run}']
  assert cli.main([*argv, '--tokenizer=ids']) == 0
  for name, of in (('bytes', bare.parent / 'run'), ('ids', run)):
    capsys.readouterr()
    out = tmp_path / name
    argv = ['checkpoint', 'export', f'--checkpoint={of}', f'--out={out}']
    assert cli.main(argv) == 0
    assert f'no tokenizer.json describes {name}' in capsys.readouterr().out
    assert not (out / files_lib.TOKENIZER).exists()
    config = json.loads((out / files_lib.CONFIG).read_text())
    assert config['vocab_size'] == 264 and config['eos_token_id'] == 257
