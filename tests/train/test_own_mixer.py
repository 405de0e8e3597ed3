"""A run with a mixer of its own file: trained, resumed, decoded, evaluated.

No checkpoint brings code: whoever opens the run names the file.
"""

import contextlib
import json

import jax
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.configs.base import extra
from paraxis.configs.base import mixers
from paraxis.decode.evaluate import harness
from paraxis.models import layer
from paraxis.train import cli
from paraxis.train import loop
from paraxis.train.run import metrics


def _train(file, run, text, **changes):
  config = command_line.load(str(file))
  changes = {'data.path': str(text)} | changes
  config.update_from_flattened_dict(changes)
  one = jax.devices()[:1]
  return loop.run(schema.view(config), run, say=lambda line: None, devices=one)


def _meta(step):
  """What the manifest of a step's folder says beside the leaves."""
  return json.loads((step / 'manifest/metadata').read_text())['meta']


def _forget():
  """As in a new process."""
  for letter in list(mixers.OWN):
    del mixers.OWN[letter], mixers.TABLE[letter], layer.MIXERS[letter]
  extra._sections.clear()
  extra.forget()


@contextlib.contextmanager
def _refused(capsys, *words):
  """A command that exits with 2 and one line, which has the words."""
  codes = []
  yield codes
  shown = capsys.readouterr().err
  assert codes == [errors.EXIT_USER] and shown.count('\n') == 1, shown
  assert all(word in shown for word in words), shown


def test_its_terms_and_tallies_are_written(own_file, tiny, tmp_path):
  """Sums over layers, as they are in the loss: not in train/loss, in nats."""
  found = (
    "aux.Aux({'sparsity': aux.part(jnp.float32(0.25))}, "
    "{'rows': aux.part(jnp.float32(3))}, {})"
  )
  file, rows = own_file('aux.NOTHING', found), []
  config = command_line.load(str(file))
  config.model.update(pattern='Q', num_layers=2)
  config.update_from_flattened_dict({'data.path': str(tiny.text)})
  loop.run(
    schema.view(config), tmp_path / 'run', say=lambda line: None,
    devices=jax.devices()[:1],
    callbacks=(lambda step, values, job: rows.append(values),),
  )  # fmt: skip
  assert len(rows) == 2
  for row in (*rows, metrics.read(tmp_path / 'run')[2]):
    assert row['train/sparsity_loss'] == 0.5 and row['tally/rows'] == 6


def test_from_training_to_decoding(
  own_file, tiny, tmp_path, capsys, settings_stay
):
  file, run = own_file(), tmp_path / 'run'
  options = {'extra.decay': 0.25, 'data.cache_dir': str(tmp_path / 'tokens')}
  result = _train(file, run, tiny.text, **options)
  assert result['step'] == 2
  manifest = _meta(run / 'checkpoints/2')
  assert list(manifest['own_mixers']) == ['Q']
  assert manifest['own_mixers']['Q']['file'] == 'mine.py'
  assert '"decay": 0.25' in manifest['config']
  assert 'register' not in str(manifest)  # values, no code

  decode = ['decode', f'--checkpoint={run}', '--prompt=the', '--mesh=data=8']
  decode += ['--max_new_tokens=2']
  book = tmp_path / 'book.txt'
  book.write_text('the song')
  evaluate = ['evaluate', f'--checkpoint={run}', f'--tasks={book}']
  draft = ['draft', f'--checkpoint={run}', f'--out={tmp_path / "draft.npz"}']
  draft += (
    '--method=speculative --draft_layers=1 --tokens=600 --length=16'.split()
  )
  draft += '--steps=2 --batch=16'.split()
  for argv in (decode, evaluate, draft):
    _forget()
    with _refused(
      capsys, 'mine.py', '--config=mine.py', 'brings code'
    ) as codes:
      codes.append(cli.main(argv))
  with _refused(capsys, 'no mixer of its own') as codes:
    codes.append(cli.main([*decode, '--config=quickstart']))
  with _refused(capsys, '--config.model.d_ff', 'leave it out') as codes:
    changed = [f'--config={file}', '--config.model.d_ff=32']
    codes.append(cli.main([*draft, *changed]))
  assert cli.main([*draft, f'--config={file}']) == 0
  assert (tmp_path / 'draft.npz').is_file()
  capsys.readouterr()
  _forget()
  assert cli.main([*decode, f'--config={file}']) == 0
  shown = capsys.readouterr()
  assert shown.out.startswith('the') and 'may be others' not in shown.err
  _forget()
  with support.refused('--config=mine.py'):
    harness.Requests(checkpoint=run)
  scorer = harness.Requests(checkpoint=run, config=file, mesh='data=8').scorer
  assert scorer.continuations([('the', ' song')], [0])

  # The same file resumes; another one may decode, said, and not resume.
  _forget()
  options['train.steps'] = 3
  assert _train(file, run, tiny.text, **options)['step'] == 3
  file.write_text(file.read_text() + '# another\n')
  _forget()
  with pytest.raises(errors.UserError, match='give|Give the file as it was'):
    _train(file, run, tiny.text, **options | {'train.steps': 4})
  assert cli.main([*decode, f'--config={file}']) == 0
  assert capsys.readouterr().err.count('may be others') == 1
  _forget()
  with pytest.raises(errors.UserError, match='extra.decay was 0.25, is now'):
    _train(file, run, tiny.text, **options | {'extra.decay': 0.5})
