"""What is continued and what is printed of it, without a model."""

import io
import json
import sys
import types

import pytest
import support

from paraxis.decode import prompts as prompts_lib


class Terminal(io.StringIO):
  """A stream that a person reads."""

  def isatty(self):
    return True


def options(**given):
  plain = dict(
    prompt=[], prompts_file=None, chat=False, json=False, stream=False,
    trace=False, system='', stop=[],
  )  # fmt: skip
  return types.SimpleNamespace(**plain | given)


@pytest.mark.parametrize('content', [b'', b'\n\n', b' \t\n'])
def test_a_file_without_prompts(tmp_path, content, capsys):
  file = tmp_path / 'prompts.txt'
  file.write_bytes(content)
  with support.refused(f'--prompts_file={file} holds no prompt'):
    prompts_lib.read(options(prompts_file=str(file)))
  lines = len(content.splitlines())
  said = f'{lines} empty lines are dropped' if lines else ''
  assert said in capsys.readouterr().err
  with support.refused('nothing to continue', '--prompt='):
    prompts_lib.read(options())
  assert prompts_lib.read(options(chat=True)) == ((), (), {}, ())


def test_lines_keep_their_numbers(tmp_path, capsys):
  """Of blank ones and of one that is no text, beside prompts of flags."""
  file = tmp_path / 'prompts.txt'
  file.write_bytes(b'one \n\n\xff\xfe\nthree\n')
  found = prompts_lib.read(options(prompt=['zero'], prompts_file=str(file)))
  assert found.texts == ('zero', 'one', '', 'three')
  assert [p.rpartition(' ')[2] for p in found.places] == ['', '1', '3', '4']
  assert found.bad == {2: 'byte 0 is not UTF-8'}
  left, kept = prompts_lib.without_bad(found, ['a', 'b', 'c', 'd'])
  assert left.texts == ('zero', 'one', 'three') and kept == ['a', 'b', 'd']
  assert left.numbers == (0, 1, 3)
  said = capsys.readouterr().err
  assert 'line 3 is left out: byte 0 is not UTF-8' in said
  assert 'blanks at the end of 1 of 4 prompts' in said


@pytest.mark.parametrize(
  'given',
  [dict(prompt=['a', 'b\udcff']), dict(prompt=['a'], system='b\udcff'),
   dict(prompt=['a'], stop=['b\udcff'])],
  ids=lambda given: [*given][-1],
)  # fmt: skip
def test_bytes_of_the_command_line_that_are_no_text(given):
  """As Python has them in sys.argv."""
  flag = [*given][-1]
  with support.refused(f'--{flag}=b', 'udcff: character 1 is no UTF-8'):
    prompts_lib.read(options(**given))


@pytest.mark.parametrize(
  'fills, said',
  [
    (False, '2 texts: 6 tokens after the first in 4 calls of the model, 1.50'),
    (True, '2 texts: 8 tokens in 4 calls of the model, 2.00'),
  ],
)
def test_tokens_a_call_are_those_of_calls(capsys, fills, said):
  """Reading the prompt makes the first token, but where calls fill places."""
  prompts = prompts_lib.Prompts(('a', 'b'), ('', ''), {}, (0, 1))
  shown = prompts_lib.Output(options(), prompts, [None, None], 7)
  result = dict(tokens=[1] * 4, calls=2, lengths=[0, 1, 0, 1], forwards=0)
  shown.counts([result] * 2, fills)
  assert f'{said} a call; ' in capsys.readouterr().err
  shown.counts([result | dict(forwards=8)] * 2, fills)
  more = f'{said} a call, and 16 forwards of the draft; '
  assert more in capsys.readouterr().err


@pytest.mark.parametrize('person', [True, False])
def test_progress_is_one_line(monkeypatch, person):
  """Rewritten on a terminal as texts end, and absent from a file."""
  out, err = io.StringIO(), Terminal() if person else io.StringIO()
  monkeypatch.setattr(sys, 'stdout', out)
  monkeypatch.setattr(sys, 'stderr', err)
  prompts = prompts_lib.Prompts(('a', 'b'), ('', ''), {}, (0, 1))
  shown = prompts_lib.Output(options(stream=True), prompts, [None, None], 7)
  result = dict.fromkeys(prompts_lib.KEYS, 'x')
  for i in (1, 0):
    shown.hooks['on_end'](i, result)
  shown.close()
  rows = [json.loads(line)['index'] for line in out.getvalue().splitlines()]
  assert rows == [1, 0]
  wanted = '\rparaxis: 1 of 2 prompts\rparaxis: 2 of 2 prompts\n'
  assert err.getvalue() == (wanted if person else '')
