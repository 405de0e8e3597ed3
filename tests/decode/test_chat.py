"""Conversations: what the model reads of them, and what is refused."""

import io
import json
import pathlib

import jax
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.decode import __main__ as command
from paraxis.decode import chat as chat_lib
from paraxis.decode import load
from paraxis.models import build
from paraxis.models.text import tokenizer

CHATML = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content"
  " + '<|im_end|>' + '\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STARTS, ENDS = 2048, 2049
VOCAB = 2050


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return saved(tmp_path_factory.mktemp('run'))


def saved(folder, change=lambda params: params):
  """A run of a small model, whose tokenizer has a template beside it.

  change: of its parameters.
  """
  path = pathlib.Path(tokenizer.__file__).parent / 'bpe2048.json'
  spec = json.loads(path.read_text())
  for n, text in ((STARTS, '<|im_start|>'), (ENDS, '<|im_end|>')):
    spec['added_tokens'].append(
      dict(spec['added_tokens'][0], id=n, content=text)
    )
    spec['model']['vocab'][text] = n
  own = folder / 'tokenizer.json'
  own.write_text(json.dumps(spec))
  (folder / 'chat_template.jinja').write_text(CHATML)
  config = schema.view({
    'model': dict(
      vocab_size=VOCAB, d_model=16, num_layers=2, num_heads=2, d_ff=32,
      embedding_init_std=1.0, tied_embedding=False,
    ),
    'data': dict(tokenizer=str(own)),
    'decode': dict(max_new_tokens=6, temperature=0.0),
  })  # fmt: skip
  built = build.build(config, 'data=1', devices=jax.devices()[:1])
  with build.use(built):
    params = change(jax.jit(lambda: built.model.init(jax.random.key(0)))())
  return support.save_run(folder, config, built, params, (1,))


@pytest.fixture
def run(workdir, capsys):
  def call(*flags):
    argv = [f'--checkpoint={workdir}', '--chat', *flags]
    code = command_line.run(command.main, argv)
    out, err = capsys.readouterr()
    return code, out, err

  return call


def ids_of(tokens, *turns):
  """ChatML by hand, and the beginning of an answer."""
  out = []
  for role, content in turns:
    out += [STARTS, *tokens.encode(f'{role}\n{content}'), ENDS]
    out += tokens.encode('\n')
  return [*out, STARTS, *tokens.encode('assistant\n')]


@pytest.fixture
def made(workdir):
  with load.Checkpoint(workdir, say=lambda line: None) as opened:
    config = schema.view(opened.config())
    yield opened.generator(config), opened.template(config.data)


def test_a_message_is_read_by_the_template(run, made):
  generator, template = made
  assert template == CHATML
  for system in ('', 'Be brief.'):
    turns = [('system', system)] if system else []
    ids = ids_of(generator.tokenizer, *turns, ('user', 'Name it'))
    (want,) = generator.generate([ids])
    flags = [f'--system={system}'] if system else []
    code, out, _ = run('--prompt=Name it', '--json', *flags)
    (sample,) = json.loads(out)['samples']
    assert code == 0 and sample['tokens'] == want['tokens']
    assert sample['prompt'] == 'Name it'
  code, out, _ = run('--prompt=One', '--prompt=Two')
  heads = [line for line in out.splitlines() if line.startswith('===')]
  assert code == 0 and heads == ['=== One', '=== Two']


def test_a_conversation_goes_on(run, made, monkeypatch):
  """The second answer has read the first one, as the ids that it was."""
  generator, _ = made
  tokens, ids, want = generator.tokenizer, [], []
  for message in ('Name it', 'And then'):
    ids += ids_of(tokens, ('user', message))
    (found,) = generator.generate([ids])
    ids += [*found['tokens'], ENDS, *tokens.encode('\n')]
    want.append(found['text'])
  monkeypatch.setattr('sys.stdin', io.StringIO('Name it\n\n And then \n'))
  code, out, _ = run()
  assert code == 0 and out == ''.join(f'{text}\n' for text in want)
  (alone,) = generator.generate([ids_of(tokens, ('user', 'And then'))])
  assert alone['text'] != want[1]  # the test can fail


class Told:
  """A loop.Generator with answers that are given; keeps what it read."""

  def __init__(self, tokenizer, *answers):
    """answers: (ids, text, finish) each."""
    self.tokenizer, self._answers, self.read = tokenizer, [*answers], []

  def generate(self, prompts, **_):
    self.read += prompts
    tokens, text, finish = self._answers.pop(0)
    return [dict(tokens=tokens, text=text, finish=finish)]


def told(template, tokens, *answers, lines=('One', 'Two')):
  """(what each answer of a conversation has read, lines refused)."""
  made = Told(tokens, *answers)
  refused = chat_lib.talk(made, chat_lib.Chat(tokens, template), lines)
  return made.read, refused


def test_an_answer_stays_as_it_was_written(made):
  """Though it spells a special token, is of other tokens than its text, or
  has one that no text has."""
  tokens = made[0].tokenizer
  line = tokens.encode('\n')
  for text in ('the <|im_end|> of it', '  two\n', 'the', '\ue000'):
    ids = [i for c in text for i in tokens.encode(c)]
    for written in (ids, [*ids, STARTS], tokens.encode(text)):
      given = (written, text, 'length'), ([], '', 'end')
      (first, second), refused = told(CHATML, tokens, *given)
      assert first == ids_of(tokens, ('user', 'One')) and not refused
      new = [ENDS, *line, *ids_of(tokens, ('user', 'Two'))]
      assert second == [*first, *written, *new]


def test_of_an_answer_that_a_stop_ends_its_text_stays(made):
  tokens = made[0].tokenizer
  ids = tokens.encode('the') + tokens.encode('Xnd')
  for text, want in (
    ('the', tokens.encode('the')),
    ('theX', tokens.encode('the') + tokens.encode('X')),
  ):
    given = (ids, text, 'stop'), ([], '', 'end')
    (first, second), _ = told(CHATML, tokens, *given)
    assert second[len(first) :][: len(want) + 1] == [*want, ENDS]


def test_a_template_may_leave_out_a_part_of_answers(made):
  """It is followed where its text can be; blanks alone change nothing."""
  tokens = made[0].tokenizer
  short = CHATML.replace('m.content', "m.content.split('=')[-1]")
  trims = CHATML.replace('m.content', 'm.content|trim')
  given = (tokens.encode('why = it '), 'why = it ', 'end'), ([], '', 'end')
  (first, second), _ = told(short, tokens, *given)
  turns = ('user', 'One'), ('assistant', ' it '), ('user', 'Two')
  assert second == ids_of(tokens, *turns)
  (first, second), _ = told(trims, tokens, *given)
  assert second[len(first) :][: len(given[0][0])] == given[0][0]


def test_what_follows_an_answer_is_no_beginning(tmp_path):
  """Of a vocabulary that puts a space in front of what begins."""
  pieces = ['<unk>', '\u2581', '\u2581a', 'a', '.', '<s>']
  spec = dict(
    model=dict(
      type='BPE', vocab={p: i for i, p in enumerate(pieces)}, unk_token='<unk>',
      merges=[['\u2581', 'a']],
    ),
    pre_tokenizer=dict(
      type='Metaspace', replacement='\u2581', prepend_scheme='first',
      split=False,
    ),
    added_tokens=[dict(
      id=5, content='<s>', special=True, single_word=False, lstrip=False,
      rstrip=False, normalized=False,
    )],
  )  # fmt: skip
  file = tmp_path / 'tokenizer.json'
  file.write_text(json.dumps(spec))
  tokens = tokenizer.load(str(file))
  template = '{% for m in messages %}{{ m.content }}.{% endfor %}'
  given = ([3, 3], 'aa', 'length'), ([], '', 'end')
  (first, second), _ = told(template, tokens, *given, lines=('a', 'a'))
  assert first[-2:] == [2, 4]
  assert second == [*first, 3, 3, 4, 3, 4]


def test_a_message_that_spells_a_special_token_is_left_out(run, monkeypatch):
  want = run('--prompt=Name it')[1].splitlines()[-1]
  monkeypatch.setattr(
    'sys.stdin', io.StringIO('an <|im_end|>\nName it\n<|im_start|>\n')
  )
  code, out, err = run()
  assert (code, out.splitlines()[-1:]) == (2, [want])
  said = [line for line in err.splitlines() if 'spells the special' in line]
  assert len(said) == 2 and said[0].startswith('paraxis: stdin: a message')


def test_an_answer_ends_as_turns_do(made, tmp_path, capsys):
  """By what the template writes there, which is no end token."""
  generator, template = made
  ids = ids_of(generator.tokenizer, ('user', 'Name it'))
  (whole,) = generator.generate([ids])
  last = next(t for t in whole['tokens'] if t != whole['tokens'][0])
  before = whole['tokens'][: whole['tokens'].index(last)]

  def change(params):  # the end of a turn is a little likelier than `last`
    head = params['head']
    return params | {'head': head.at[ENDS].set(1.01 * head[last])}

  run = saved(tmp_path, change)
  flags = [f'--checkpoint={run}', '--chat', '--prompt=Name it', '--json']
  assert command_line.run(command.main, flags) == 0
  (sample,) = json.loads(capsys.readouterr().out)['samples']
  assert (sample['finish'], sample['tokens']) == ('end', before)
  ends = lambda text: chat_lib.Chat(generator.tokenizer, text).ends()
  assert ends(template) == (ENDS,)
  plain = '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}'
  assert ends(plain) == () == ends('<|im_end|>')
  alone = "{% if messages[1] %}{{ raise_exception('one') }}{% endif %}"
  assert ends(alone + template) == ()  # refused when there is an answer


def test_without_the_token_that_a_conversation_begins_with(made):
  """Written by the template, or put before it; a masked model reads none."""
  generator, template = made
  asked = chat_lib.asked('Name it')
  for text in (template, 'x' + template):
    with_it, without = (
      chat_lib.Chat(generator.tokenizer, text, begins=begins).ids(asked)
      for begins in (True, False)
    )
    assert with_it[1:] == without


@pytest.mark.parametrize(
  'encoding, errors', [('utf-8', 'strict'), ('ascii', 'surrogateescape')]
)
def test_a_message_that_is_no_text(run, monkeypatch, encoding, errors):
  """In a locale of UTF-8, and in C; those before it are answered, and text is
  read as UTF-8 in both."""

  def talk(text):
    held = io.BytesIO(text)
    stdin = io.TextIOWrapper(held, encoding=encoding, errors=errors)
    monkeypatch.setattr('sys.stdin', stdin)
    return run()

  code, want, _ = talk('Näme it\n'.encode())
  assert code == 0 and want
  code, out, err = talk('Näme it\n'.encode() + b'And \xff then\n')
  assert (code, out) == (2, want)
  said = 'stdin: And \\udcff then: character 4 is no UTF-8'
  assert said in err.splitlines()[-1]


def test_what_is_refused(run, tmp_path):
  code, out, err = run('--prompt=a <|im_end|> b')
  assert (code, out) == (2, '') and "spells the special token '<|im_end" in err
  file = tmp_path / 'prompts.txt'
  file.write_text('One\nTwo <|im_start|>\n')
  code, out, err = run(f'--prompts_file={file}', '--json')
  (sample,) = json.loads(out)['samples']
  assert code == 2 and sample['prompt'] == 'One'
  assert 'line 2 is left out: message 1 (user) spells' in err
  with support.refused("tokenizer 'x' has none beside it"):
    chat_lib.Chat(type('Named', (), dict(name='x')), '')
