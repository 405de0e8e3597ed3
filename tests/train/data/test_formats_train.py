"""`paraxis train` on text as users have it: every format lowers the loss.

The readers' own tests compare rows (test_readers.py), those of conversations
their masks (test_chat.py); here the command reads, tokenizes and trains.
"""

import importlib
import json
import math
import random

import pytest
import zstandard

from paraxis.train import cli
from paraxis.train.run import metrics

pytestmark = pytest.mark.usefixtures('settings_stay')

STEPS = 20
WORDS = 'sea wind rock salt gull and over under storm calm sail north'.split()
TEMPLATE = (
  "{% for m in messages %}{{ '[' + m.role + '\\n' + m.content + ']\\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '[assistant\\n' }}{% endif %}"
)
PROMPT, ANSWER = 34, 'AAAAAAAA'  # random letters; what can be learned


def _texts(count=150):
  rng = random.Random(0)
  return [' '.join(rng.choices(WORDS, k=60)) for _ in range(count)]


def _parquet(folder):
  arrow = importlib.import_module('pyarrow')
  table = importlib.import_module('pyarrow.parquet')
  path = folder / 'train-00000-of-00001.parquet'
  rows = arrow.table({'text': _texts(), 'url': ['x'] * 150})
  table.write_table(rows, path, row_group_size=40)
  return path


def _text8(folder):
  path = folder / 'text8'
  path.write_text(' '.join(_texts(400)))  # 120 kB: a line that is cut
  return path


def _zstd(folder):
  path = folder / 'web.jsonl.zst'
  lines = ''.join(json.dumps({'text': t}) + '\n' for t in _texts())
  path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
  return path


def _chat(folder):
  rng, path = random.Random(0), folder / 'chat.jsonl'
  letters = 'abcdefghijklmnopqrstuvwxyz'
  talks = [
    [
      {'role': 'user', 'content': ''.join(rng.choices(letters, k=PROMPT))},
      {'role': 'assistant', 'content': ANSWER},
    ]
    for _ in range(200)
  ]
  lines = [json.dumps({'messages': talk}) + '\n' for talk in talks]
  path.write_text(''.join(lines))
  return path


def _trained(tiny, folder, path, **data):
  """[{metric: value} of every step] of the command, which ends with 0."""
  fields = dict(path=path, cache_dir=folder / 'tokens') | data
  argv = ['train', f'--config={tiny.file}', f'--workdir={folder / "run"}']
  argv += [f'--config.data.{name}={value}' for name, value in fields.items()]
  argv += [f'--config.train.steps={STEPS}', '--config.checkpoint.every=99']
  assert cli.main([*argv, '--config.optimizer.learning_rate=0.01']) == 0
  rows = metrics.read(folder / 'run')
  assert list(rows) == list(range(1, STEPS + 1))
  return list(rows.values())


def _falls(rows):
  """The loss of the first and of the last step, which is lower."""
  losses = [row['train/loss'] for row in rows]
  assert all(map(math.isfinite, losses)) and rows[-1]['train/skipped'] == 0
  assert losses[0] > 5  # of 264 tokens, none known: log 264 = 5.6
  assert losses[-1] < losses[0] - 1, losses
  return losses[0], losses[-1]


@pytest.mark.parametrize(
  'write', [pytest.param(_parquet, marks=pytest.mark.extras), _text8, _zstd]
)
def test_text_is_learned(tiny, tmp_path, write):
  _falls(_trained(tiny, tmp_path, write(tmp_path)))


@pytest.mark.parametrize('loss_on', ['assistant', 'all'])
def test_conversations_are_learned(tiny, tmp_path, loss_on):
  """Prompts of random letters: a loss below theirs is that of answers alone.

  `all` shows that the bound can fail.
  """
  (tmp_path / 'chat.jinja').write_text(TEMPLATE)
  rows = _trained(
    tiny, tmp_path, _chat(tmp_path), loss_on=loss_on, packing='first_fit',
    chat_template=tmp_path / 'chat.jinja',
  )  # fmt: skip
  answer = len(f'{ANSWER}]\n') + 1  # and the end of the document
  prompt = len('[user\n') + PROMPT + len(']\n[assistant\n')
  each = answer if loss_on == 'assistant' else prompt + answer
  # A conversation fills a row of 64, and a step has 8 rows.
  assert prompt + answer == 64
  assert {row['train/tokens'] for row in rows} == {8 * each}
  _, last = _falls(rows)
  entropy = PROMPT * math.log(26) / 64  # of a conversation, a token
  assert (last < entropy) == (loss_on == 'assistant'), (last, entropy)
