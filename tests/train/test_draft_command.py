"""`paraxis draft`: a draft for a run, which `paraxis decode` then uses."""

import json
import os

import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.decode import __main__ as decode_main
from paraxis.decode import methods
from paraxis.models import decoder
from paraxis.models.text import tokenizer
from paraxis.train import cli
from paraxis.train import draft
from paraxis.train import draft_command
from paraxis.train.data import corpus


def saved(path, **model):
  """A run of a small model that nobody trained."""
  config = schema.view({
    'model': dict(
      vocab_size=2056, d_model=16, num_layers=2, num_heads=2, d_ff=32,
      embedding_init_std=1.0, **model,
    ),
    'decode': dict(max_new_tokens=6),
  })  # fmt: skip
  built, params = support.untrained(config)
  return support.save_run(path, config, built, params, (1,))


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return saved(tmp_path_factory.mktemp('run'))


FEW = '--tokens=600 --length=16 --steps=2 --batch=16'.split()


@pytest.mark.parametrize(
  'method, more',
  [('medusa', ['--heads=2']), ('speculative', ['--draft_layers=1']),
   ('eagle', []), ('ppd', []), ('falcon', []), ('eagle', ['--words=50']),
   ('medusa', ['--own=9', '--words=50'])],
)  # fmt: skip
def test_a_draft_is_trained_and_used(workdir, tmp_path, capsys, method, more):
  out = tmp_path / 'draft.npz'
  argv = [f'--checkpoint={workdir}', f'--method={method}', f'--out={out}']
  assert cli.main(['draft', *argv, *FEW, *more]) == 0
  said = capsys.readouterr().out
  assert f'{method}: 2 steps of 16 tokens' in said and 'held-out' in said
  flags = [f'--checkpoint={workdir}', '--prompt=The', '--json']
  flags += ['--domain=drama', '--temperature=0']
  texts = []
  for extra in ([], [f'--method={method}', f'--draft={out}', '--lossless']):
    assert command_line.run(decode_main.main, flags + extra) == 0
    (sample,) = json.loads(capsys.readouterr().out)['samples']
    texts.append(sample['text'])
  assert texts[0] == texts[1]
  assert sum(sample['lengths']) == sample['calls']
  code = command_line.run(
    decode_main.main, [*flags, '--method=jacobi', f'--draft={out}']
  )
  assert code == 2 and 'uses no trained draft' in capsys.readouterr().err


MASKED = {
  'full': dict(visibility='full', mask_id=2050),
  'shifted': dict(visibility='full', mask_id=2050, mask_shift=True),
  'block': dict(visibility='block', block=4, mask_id=2050, mask_shift=True),
}  # fmt: skip


@pytest.mark.parametrize('name', MASKED)
def test_a_filter_is_trained_and_used(tmp_path, capsys, monkeypatch, name):
  """It learns from the calls of the decoder that knows the end."""
  kept = []
  guided = draft.filters.guided
  monkeypatch.setattr(
    draft.filters, 'guided',
    lambda *given: kept.append((given, guided(*given))) or kept[-1][1],
  )  # fmt: skip
  run, out = saved(tmp_path / 'run', **MASKED[name]), tmp_path / 'filter.npz'
  argv = [f'--checkpoint={run}', '--method=filter', f'--out={out}', '--block=4']
  few = '--tokens=128 --length=16 --own=8 --steps=3'.split()
  assert cli.main(['draft', *argv, *few]) == 0
  said = capsys.readouterr().out
  assert 'filter: 3 steps' in said and '--method=unmask --config' in said
  # Of training text and of held-out text, 4 tokens of a canvas in 2 canvases.
  (read, rows, at, width, mask), (calls, records) = kept[0]
  assert (len(kept), at, width, mask) == (2, 8, 4, 2050)
  assert rows.shape == (8, 16) and records.open.shape == (calls.sum(), 4)
  # What it reads is what calls of the loop read: the text is made anew.
  row, every = np.array(rows), np.arange(len(rows))
  row[:, at:] = mask
  for first in np.repeat([8, 12], 4):
    tokens, p = map(np.array, read(row))
    open_ = row[:, first : first + 4] == mask
    best = first + np.where(open_, p[:, first : first + 4], -1).argmax(1)
    row[every, best] = tokens[every, best]
  np.testing.assert_array_equal(row, rows)
  flags = [f'--checkpoint={run}', '--prompt=The', '--json', '--temperature=0']
  flags += ['--method=unmask', f'--draft={out}', '--max_new_tokens=6']
  unmask = dict(block=4, score='filter', count='threshold', threshold=0.0)
  flags += [f'--config.decode.unmask.{k}={v}' for k, v in unmask.items()]
  assert command_line.run(decode_main.main, flags) == 0
  (sample,) = json.loads(capsys.readouterr().out)['samples']
  assert len(sample['tokens']) <= 6 and sample['calls'] <= 6


def test_filters_of_what_is_no_masked_model(workdir, tmp_path, capsys):
  argv = [f'--checkpoint={workdir}', '--method=filter', '--out=a.npz']
  assert cli.main(['draft', *argv, '--length=16', '--own=8']) == 2
  assert 'is no model of masks' in capsys.readouterr().err
  assert cli.main(['draft', *argv, '--length=16']) == 2
  assert 'a row of --length=16 with --own' in capsys.readouterr().err
  run = saved(tmp_path / 'run', **MASKED['block'])
  argv[0] = f'--checkpoint={run}'
  assert cli.main(['draft', *argv, '--length=16', '--own=7']) == 2
  assert 'no blocks of model.block=4' in capsys.readouterr().err


@pytest.mark.parametrize(
  'argv, words',
  [
    (['--method=jacobi', '--out=a.npz'], '--method=jacobi: trained are medusa'),
    (['--method=medusa'], '--out=FILE.npz'),
    (['--method=medusa', '--out=/nowhere/a.npz'], 'no folder /nowhere'),
    (['--method=medusa', '--out=/tmp'], '--out=/tmp is a folder: name a file'),
    (['--method=medusa', '--out=/proc/a.npz'], 'a.npz cannot be written ('),
    (['--method=speculative', '--out=a.npz'], '--draft_layers=0'),
    (['--method=eagle', '--draft_layers=1', '--out=a.npz'], 'others have none'),
    (['--method=speculative', '--draft_layers=1', '--draft_group=2',
      '--out=a.npz'], '--draft_group=2: layers that read the same'),
    (['--draft_group=2', '--out=a.npz'], 'of --draft_layers=0; take 1 to 1'),
    (['--method=ppd', '--own=64', '--out=a.npz'], 'of a row of --length=64'),
    (['--method=medusa', '--out=a.npz', '--weights=x'], 'one of the two'),
    (['--method=medusa', '--out=a.npz', '--tokens=90', '--length=16'],
     '5 rows of 16 tokens'),
    (['--method=speculative', '--draft_layers=2', '--out=a.npz', '--own=9'],
     'draft_layers=2 of 2; take 1 to 1'),
    (['--out=a.npz', '--heads=0'], 'flag --heads=0'),
    (['--out=a.npz', *FEW, '--heads=16'], '--heads=16: in a row of '),
    (['--out=a.npz', *FEW, '--method=ppd', '--heads=16'], 'at most 15 come'),
    (['--out=a.npz', *FEW, '--rate=-0.001'], '--rate=-0.001: give'),
    (['--out=a.npz', *FEW, '--rate=nan'], '--rate=nan: give'),
    (['--out=a.npz', *FEW, '--method=eagle', '--heads=3'],
     '--heads=3 is read by --method=medusa and ppd, not by eagle'),
    (['--out=a.npz', *FEW, '--block=4'], '--block=4 is read by'),
    (['--out=a.npz', '--tokens=0'], 'flag --tokens=0'),
    (['--out=a.npz', '--batch=0'], 'flag --batch=0'),
  ],
)  # fmt: skip
def test_what_cannot_be_trained(workdir, capsys, argv, words):
  code = cli.main(['draft', f'--checkpoint={workdir}', *argv])
  assert code == 2 and words in capsys.readouterr().err


def test_what_is_no_file_is_not_opened(tmp_path):
  """A named pipe would wait for a reader; what is there stays as it is."""
  pipe, file = tmp_path / 'pipe.npz', tmp_path / 'a.npz'
  os.mkfifo(pipe)
  file.write_bytes(b'before')
  for path, words in ((pipe, 'a named pipe'), ('/dev/null', 'a device')):
    with support.refused(f'--out={path} cannot be written', words):
      draft_command._out(str(path))
  assert draft_command._out(str(file)) == file
  assert file.read_bytes() == b'before'


@pytest.mark.parametrize(
  'method, model, words',
  [
    ('medusa', dict(pattern='GF'), 'drafts a tree, and layers of kind G'),
    ('ppd', dict(pattern='FG'), 'drafts a tree, and layers of kind G'),
    ('eagle', dict(pattern='FG'), 'last layer of the model is of kind G'),
    ('falcon', dict(pattern='FG'), 'last layer of the model is of kind G'),
    ('speculative', dict(
      norm_placement='sandwich', recurrence=dict(core=1)
    ), 'model.recurrence.core=1'),
  ],
)  # fmt: skip
def test_what_decoding_refuses_is_not_trained(method, model, words):
  """By what is asked before any text is made."""
  model = decoder.Decoder(
    schema.view({'model': dict(num_layers=2, **model)}).model
  )
  with support.refused(words):
    methods.check_training(model, method, int(method == 'speculative'))


def test_texts_that_are_all_too_short(workdir, tmp_path, capsys):
  (tmp_path / 'a.txt').write_text('Sea.')
  argv = [f'--checkpoint={workdir}', f'--data={tmp_path}', '--out=a.npz']
  assert cli.main(['draft', *argv, '--length=16', '--own=4']) == 2
  said = capsys.readouterr().err
  assert 'no text for rows of 16 tokens: no document is long' in said


def test_the_model_writes_rows_of_any_length(workdir, capsys):
  """Whatever the run's decode.cache_length; the text is too little then."""
  argv = [f'--checkpoint={workdir}', '--out=a.npz', '--tokens=2200']
  assert cli.main(['draft', *argv, '--length=1100', '--own=4']) == 2
  said = capsys.readouterr()
  assert '2 rows of 1096 tokens of text and 4 of the model' in said.out
  assert '2 rows of 1100 tokens of text: a draft needs' in said.err


def test_rows_are_no_longer_than_a_table_of_positions(tmp_path, capsys):
  """Refused before any text is read; of ppd with its prompt tokens."""
  run = saved(tmp_path / 'run', position='learned', max_positions=18)
  argv = [f'--checkpoint={run}', '--out=a.npz', f'--data={tmp_path}/none']
  for more, words in (
    (['--length=19'], '--length=19 is 19 tokens'),
    (['--method=ppd', '--length=16'], '--length=16 --heads=3 is 19 tokens'),
  ):
    assert cli.main(['draft', *argv, *more]) == 2
    said = capsys.readouterr().err
    assert f'{words}, but model.max_positions=18' in said
  assert cli.main(['draft', *argv, '--length=18']) == 2
  assert f'{tmp_path}/none' in capsys.readouterr().err


def test_text_is_of_every_domain_and_of_one_part():
  tokens = tokenizer.load('bpe2048')
  rows = draft.rows(tokens, 'fixture', False, 4000, 64)
  assert rows.shape == (62, 64)
  held = draft.rows(tokens, 'fixture', True, 4000, 64)
  domains = {d.domain for d in corpus.documents('fixture')}
  starts = (rows == tokens.bos_id(None)).sum()
  assert starts >= len(domains)
  text = tokens.decode(rows[0, 1:40].tolist())
  train = [d for d in corpus.documents('fixture') if not d.held]
  assert any(d.text.startswith(text[:60]) for d in train)
  assert not (rows[0] == held[0]).all()


def test_a_lossy_judge_is_refused(workdir, capsys):
  flags = [f'--checkpoint={workdir}', '--prompt=The', '--judge=typical']
  assert command_line.run(decode_main.main, [*flags, '--lossless']) == 2
  assert 'decode.judge=typical changes' in capsys.readouterr().err


@pytest.mark.parametrize('method', methods.CHANGING)
def test_a_method_that_changes_the_text_is_refused(workdir, capsys, method):
  flags = [f'--checkpoint={workdir}', '--prompt=The', f'--method={method}']
  assert command_line.run(decode_main.main, [*flags, '--lossless']) == 2
  assert f'decode.method={method} draws' in capsys.readouterr().err
