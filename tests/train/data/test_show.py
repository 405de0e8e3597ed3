"""`paraxis data show`: the text of a batch, its borders, what carries loss."""

import json

import numpy as np
import pytest

from paraxis.models import batch as batch_lib
from paraxis.models.text import tokenizer
from paraxis.train import cli
from paraxis.train.data import show


def batch():
  """A row of two segments: 'abé' with its end, then 'xy'; then padding."""
  t = tokenizer.load('bytes')
  first, second = [258, *'abé'.encode(), 257], [258, *b'xy']
  pad = [256] * 3
  tokens = np.array([[*first[:-1], *second[:-1], *pad]])
  targets = np.array([[*first[1:], *second[1:], *pad]])
  segments = np.array([[1] * 5 + [2] * 2 + [0] * 3])
  weights = np.array([[0, 1, 1, 1, 1, 0, 0, 0, 0, 0]], np.float32)
  made = batch_lib.Batch(tokens, targets, segments, tokens, weights, 4.0)
  return t, made


def test_segments_are_their_text():
  t, made = batch()
  found = show.segments(made, 0, ['d/one', 'd/two'], t)
  assert found == [
    show.Segment('d/one', [('<|bos|>a', False), ('bé<|end|>', True)], 5, 4),
    show.Segment('d/two', [('<|bos|>xy', False)], 2, 0),
  ]
  printed = ''.join(part for part, _ in show.row_lines(3, found, 10))
  assert printed == (
    'row 3: 2 segments, 7 of 10 slots filled, 4 targets carry loss\n'
    '---- 1: d/one, 5 targets, 4 with loss\n'
    '<|bos|>a«bé<|end|>»\n'
    '---- 2: d/two, 2 targets, 0 with loss\n'
    '<|bos|>xy\n'
  )


@pytest.mark.parametrize('loss_on', ['all', 'assistant'])
def test_the_command(tmp_path, capsys, loss_on):
  talk = [
    {'role': 'user', 'content': 'question'},
    {'role': 'assistant', 'content': 'answer'},
  ]
  line = json.dumps({'messages': talk}) + '\n'
  (tmp_path / 'a.jsonl').write_text(line * 40)
  template = (
    "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
  )
  (tmp_path / 'chat.jinja').write_text(template)
  fields = dict(
    path=tmp_path / 'a.jsonl', cache_dir=tmp_path / 'cache', tokenizer='bytes',
    chat_template=tmp_path / 'chat.jinja', loss_on=loss_on, sequence_length=80,
    packing='first_fit',
  )  # fmt: skip
  given = [f'--config.data.{name}={value}' for name, value in fields.items()]
  command = ['data', 'show', '--config=configs/quickstart.py', *given]
  assert not cli.main([*command, '--rows=1', '--step=2'])
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith(f'step 2 of {tmp_path}/a.jsonl: ')
  whole = loss_on == 'all'
  total, each = (64, 32) if whole else (16, 8)
  assert lines[1] == (
    f'row 0: 2 segments, 64 of 80 slots filled, {total} targets carry loss'
  )
  assert lines[2].endswith(f', 32 targets, {each} with loss')
  text = 'user:question;assistant:'
  answer = 'answer;<|end|>' if whole else '«answer;<|end|>»'
  assert lines[3] == f'<|bos|>{text}{answer}'
  assert len(lines) == 6
  assert cli.main([*command, '--rows=0']) == 2
  assert '--rows=0 shows nothing' in capsys.readouterr().err


MASKED = [
  '--config.train.objective=masked', '--config.model.visibility=full',
  '--config.model.mask_id=259',
]  # fmt: skip
BLOCKS = [
  '--config.train.objective=block', '--config.model.visibility=block',
  '--config.model.block=8', '--config.model.mask_id=259',
]  # fmt: skip


@pytest.mark.parametrize(
  'given',
  [['--config.train.shape_cycle=4:9,1'], MASKED, BLOCKS],
  ids=['cut', 'masked', 'block'],
)
def test_rows_are_whole_and_text(tmp_path, capsys, given):
  line = json.dumps({'text': 'some words of a text'}) + '\n'
  (tmp_path / 'a.jsonl').write_text(line * 200)
  fields = dict(
    path=tmp_path / 'a.jsonl', cache_dir=tmp_path / 'cache', tokenizer='bytes',
    sequence_length=80, packing='first_fit',
  )  # fmt: skip
  command = ['data', 'show', '--config=configs/quickstart.py']
  command += [f'--config.data.{name}={x}' for name, x in fields.items()]
  assert not cli.main(command)
  wanted = capsys.readouterr().out
  assert '\n<|bos|>some words of a text<|end|>\n' in wanted
  assert not cli.main([*command, *given])
  assert capsys.readouterr().out.splitlines()[1:] == wanted.splitlines()[1:]
