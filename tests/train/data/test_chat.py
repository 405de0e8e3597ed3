"""Conversations: their tokens, what carries loss, what is refused.

The reference writes ChatML by hand and marks characters one by one.
"""

import datetime
import json
import re
import shutil
import sys
from typing import Any

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models.text import chat as templates
from paraxis.models.text import tokenizer
from paraxis.train import program
from paraxis.train.data import batches
from paraxis.train.data import chat
from paraxis.train.data import corpus
from paraxis.train.data import packing
from paraxis.train.data import rows
from paraxis.train.data import token_cache

CHATML = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content"
  " + '<|im_end|>' + '\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN = CHATML.replace('<|im_start|>', '[').replace('<|im_end|>', ']')
TALK = [
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': 'Name é.'},
  {'role': 'assistant', 'content': 'E acute.'},
  {'role': 'user', 'content': 'Thanks'},
  {'role': 'assistant', 'content': 'Bye'},
]


def write(path, talks):
  lines = [json.dumps({'messages': t}) + '\n' for t in talks]
  path.write_text(''.join(lines), encoding='utf-8')
  return path


def special_tokenizer(tmp_path):
  """The shipped BPE with <|im_start|> and <|im_end|>, and ChatML beside it."""
  import pathlib

  path = pathlib.Path(tokenizer.__file__).parent / 'bpe2048.json'
  spec = json.loads(path.read_text())
  for n, text in enumerate(('<|im_start|>', '<|im_end|>'), 2048):
    spec['added_tokens'].append(
      dict(spec['added_tokens'][0], id=n, content=text)
    )
    spec['model']['vocab'][text] = n
  (tmp_path / 'tokenizer.json').write_text(json.dumps(spec))
  (tmp_path / 'tokenizer_config.json').write_text(
    json.dumps({'chat_template': CHATML})
  )
  return str(tmp_path / 'tokenizer.json')


def build(path, tmp_path, **fields):
  if 'template' in fields:
    (tmp_path / 'chat.jinja').write_text(fields.pop('template'))
    fields['chat_template'] = str(tmp_path / 'chat.jinja')
  fields = dict(
    path=str(path), cache_dir=str(tmp_path / 'cache'), tokenizer='bytes',
    loss_on='assistant', sequence_length=32, workers=1,
  ) | fields  # fmt: skip
  config = schema.Config(
    data=schema.with_values(schema.Data(), fields),
    model=schema.Model(vocab_size=2050),
    train=schema.Train(batch_size=2),
  )
  t = tokenizer.load(config.data.tokenizer)
  made: Any = token_cache.tokens(config, t)
  return config, t, made


def by_hand(talk, start='[', stop=']'):
  """(text, whether each character is an answer's, with its stop)."""
  text, marks = '', []
  for m in talk:
    head, body = f'{start}{m["role"]}\n', f'{m["content"]}{stop}\n'
    text += head + body
    answer = m['role'] == 'assistant'
    marks += [False] * len(head) + [answer] * len(body)
  return text, marks


def test_bytes_of_answers_carry_loss(tmp_path):
  path = write(tmp_path / 'a.jsonl', [TALK, TALK[1:4]])
  _, t, made = build(path, tmp_path, template=PLAIN)
  for d, talk in enumerate((TALK, TALK[1:4])):
    text, marks = by_hand(talk)
    per_byte = [m for c, m in zip(text, marks, strict=True) for _ in c.encode()]
    ends = talk[-1]['role'] == 'assistant'
    at = slice(made.starts[d], made.starts[d + 1])
    assert made.tokens[at].tolist() == [258, *text.encode(), 257]
    assert made.loss[at].tolist() == [0, *per_byte, int(ends)]
    assert made.n_bytes[d] == sum(per_byte)
  assert t.decode(made.tokens[: made.starts[1]]) == by_hand(TALK)[0]


def test_special_tokens_of_the_template(tmp_path):
  name = special_tokenizer(tmp_path)
  path = write(tmp_path / 'a.jsonl', [TALK])
  _, t, made = build(path, tmp_path, tokenizer=name)
  ids = made.tokens.tolist()
  # The template begins and ends with special tokens: none is added.
  assert ids[0] == 2048 and ids.count(2048) == len(TALK)
  assert ids.count(2049) == len(TALK) and t.end_id not in ids
  said = ''.join(
    t.decode_bytes([i]).decode('utf-8', 'ignore')
    for i, counts in zip(ids, made.loss, strict=True)
    if counts
  )
  assert said == 'E acute.\nBye\n'
  ends = [c for i, c in zip(ids, made.loss, strict=True) if i == 2049]
  assert ends == [0, 0, 1, 0, 1]  # an answer learns to stop


def test_a_blank_first_line_hides_no_conversation(tmp_path):
  path = write(tmp_path / 'a.jsonl', [TALK])
  path.write_text('\n  \n' + path.read_text())
  _, t, made = build(path, tmp_path, template=PLAIN)
  assert made.loss is not None and made.loss.any()
  deep = tmp_path / 'deep.jsonl'
  deep.write_text('[' * 100_000 + '\n')
  with support.refused('deep.jsonl'):
    build(deep, tmp_path, loss_on='all', template=PLAIN)


def test_held_out_rows_without_loss_are_refused(tmp_path):
  """The row that is evaluated is the prompt's first part."""
  talk = [{'role': 'user', 'content': 'x' * 200},
          {'role': 'assistant', 'content': 'yes'}]  # fmt: skip
  path, splits = tmp_path / 'a.jsonl', ('train', 'train', 'held')
  lines = [json.dumps({'messages': talk, 'split': name}) for name in splits]
  path.write_text('\n'.join(lines))
  config, _, made = build(path, tmp_path, template=PLAIN)
  change = lambda n: schema.with_value(
    schema.with_value(config, 'train.eval_batches', n), 'train.batch_size', 1
  )
  with support.refused('none has loss', 'data.loss_on=assistant'):
    batches.evaluation(change(1), made)
  (held,) = batches.evaluation(change(0), made)
  assert held.n_pairs > 0


def test_workers_and_loss_on_all(tmp_path, monkeypatch):
  monkeypatch.setattr(rows, 'BLOCK', 200)
  path = write(tmp_path / 'a.jsonl', [TALK] * 9)
  _, _, one = build(path, tmp_path, template=PLAIN)
  fields = dict(template=PLAIN, workers=2, cache_dir=str(tmp_path / 'b'))
  _, _, two = build(path, tmp_path, **fields)
  np.testing.assert_array_equal(one.tokens, two.tokens)
  np.testing.assert_array_equal(one.loss, two.loss)
  _, _, whole = build(path, tmp_path, template=PLAIN, loss_on='all')
  np.testing.assert_array_equal(one.tokens, whole.tokens)
  assert whole.loss is None and whole.fingerprint != one.fingerprint


@pytest.mark.parametrize('packing_name', ['first_fit', 'concat_split'])
def test_batches_weigh_answers_alone(tmp_path, packing_name):
  path = write(tmp_path / 'a.jsonl', [TALK, TALK[1:4]] * 9)
  config, _, made = build(path, tmp_path, template=PLAIN, packing=packing_name)
  data = batches.Batches(config, made)
  seen = 0
  for t in range(data.rows // 2):
    batch = data.batch_at(t)
    assert batch.denominator == max(1, batch.weights.sum())
    assert batch.valid == (batch.segments > 0).sum()
    part = data.batch_at(t, 0, 1)
    np.testing.assert_array_equal(part.weights, batch.weights[:1])
    assert part.whole == batch.whole  # of the whole step
    seen += batch.weights.sum()
  train = made.select('train')
  inner = [made.loss[made.starts[d] + 1 : made.starts[d + 1]] for d in train]
  every = packing.counted(data.plan, np.arange(data.rows), made.loss)
  assert every == sum(x.sum() for x in inner)
  assert data.rows % 2 or seen == every
  [held] = batches.evaluation(config, made)
  assert held.n_bytes == made.n_bytes[made.held].sum()
  assert held.n_pairs == sum(
    held.batch_at(i).weights.sum() for i in range(len(held))
  )


def test_cut_conversations_name_the_remedy(tmp_path):
  """By packing itself: what is said of first_fit and of longer rows holds."""
  long = [{'role': 'user', 'content': 'é' * 30}, TALK[2]]
  short = [
    {'role': 'user', 'content': 'e'},
    {'role': 'assistant', 'content': ''},
  ]
  path = write(tmp_path / 'a.jsonl', [long, *[short] * 9])

  def said(**fields):
    config, _, made = build(path, tmp_path, template=PLAIN, **fields)
    data = batches.Batches(config, made)
    return data.plan.cut, chat.said_cut(data, made, config.data)

  fields = dict(held_out_fraction=0.0, sequence_length=70)
  cut, line = said(**fields)
  begin = f'data: {cut} documents are cut between rows of 70 tokens; every '
  assert line.startswith(begin)
  found = re.search(
    'first_fit cuts (\\d+), .* data.sequence_length=(\\d+)', line
  )
  longer, enough = map(int, found.groups())
  fields['packing'] = 'first_fit'
  assert said(**fields)[0] == longer == 1 < cut
  assert said(**fields)[1].endswith(
    f': data.sequence_length={enough} cuts none.'
  )
  for length in (enough, enough - 1):
    assert said(**fields | {'sequence_length': length})[0] == enough - length
  fields |= dict(packing='concat_split', sequence_length=enough)
  assert said(**fields)[1].endswith(': data.packing=first_fit cuts none.')


@pytest.mark.parametrize('loss_on', ['all', 'assistant'])
def test_a_step_is_compiled_for_what_a_batch_holds(tmp_path, loss_on):
  path = write(tmp_path / 'a.jsonl', [TALK] * 9)
  config, _, made = build(path, tmp_path, template=PLAIN, loss_on=loss_on)
  batch = batches.Batches(config, made).batch_at(0)
  assert (batch.valid is None) == (loss_on == 'all')
  shapes = program.of_shapes(config, 'data=1', jax.devices()[:1]).batch_shapes()
  like = lambda x, want: x.shape == want.shape and x.dtype == want.dtype
  assert jax.tree.all(jax.tree.map(like, batch, shapes))


def test_prompts_carry_no_gradient(tmp_path):
  """Other targets where the weights are 0 change no gradient; else they do."""
  path = write(tmp_path / 'a.jsonl', [TALK] * 9)
  config, _, made = build(path, tmp_path, template=PLAIN)
  batch = batches.Batches(config, made).batch_at(0)
  assert 0 < batch.weights.sum() < (batch.segments > 0).sum()
  logits = np.random.default_rng(0).normal(size=(*batch.tokens.shape, 300))

  def gradient(targets):
    def loss(z):
      nll = jax.nn.logsumexp(z, -1)
      nll -= np.take_along_axis(z, targets[..., None], -1)[..., 0]
      return (nll * batch.weights).sum() / batch.denominator

    return np.asarray(jax.grad(loss)(jax.numpy.asarray(logits)))

  first = gradient(batch.targets)
  other = np.where(batch.weights > 0, batch.targets, 7)
  np.testing.assert_array_equal(gradient(other), first)
  assert not first[batch.weights == 0].any() and first[batch.weights > 0].all()
  assert not np.array_equal(gradient(np.full_like(other, 7)), first)


@pytest.mark.parametrize(
  'messages, words',
  [
    ('hello', '"messages" is not a list with messages'),
    ([], '"messages" is not a list with messages'),
    (['hi'], 'message 1 has no "role"'),
    (
      [{'role': 'bot', 'content': 'a'}],
      "has the role 'bot', not one",
    ),
    ([{'role': 'user', 'content': None}], '(user): "content" is not a string'),
    ([{'role': 'user', 'content': '\ud800'}], 'message 1 is not Unicode'),
    (TALK[:2], 'no turn of the assistant among 2 messages'),
    ([{'role': 'user', 'content': 'a <|end|>'}], "the special token '<|end|>'"),
  ],
)
def test_bad_messages(tmp_path, messages, words):
  path = write(tmp_path / 'a.jsonl', [TALK, messages])
  with support.refused('a.jsonl:2: ', words):
    build(path, tmp_path, template=PLAIN)


@pytest.mark.parametrize(
  'template, words',
  [
    ('{% if %}', 'the chat template is not Jinja'),
    ('{{ raise_exception("no system") }}', 'fails: ValueError: no system'),
    ('{{ messages.__class__.__mro__ }}', 'fails: SecurityError'),
    ('{{ " " }}', 'the chat template makes no text of it'),
    ('{{ messages[-1].content }}', 'changes what it made of the turns before'),
  ],
)
def test_bad_templates(tmp_path, template, words):
  path = write(tmp_path / 'a.jsonl', [TALK])
  with support.refused(words):
    build(path, tmp_path, template=template)


# As transformers 5.23 renders them.
OF_TRANSFORMERS = {
  'tools': '{% if tools is none and not documents %}none{% endif %}',
  'documents': '{{ documents is defined }} {{ documents is none }}',
  'answers': (
    "{% set a = 1 %}{% for m in messages %}{{ m.role + ': ' }}"
    "{% if m.role == 'assistant' %}\n  {%- generation %}"
    '{% set a = 2 %}{{ m.content + eos }}\n  {%- endgeneration -%}\n'
    '{% else %}{{ m.content }}{% endif %} {% endfor %}{{ a }}'
  ),
}


@pytest.mark.parametrize('name', OF_TRANSFORMERS)
def test_what_templates_see_in_transformers(name):
  wanted = dict(
    tools='none', documents='True True',
    answers='user: Name é. assistant: E acute.</s> user: Thanks 1',
  )  # fmt: skip
  text = OF_TRANSFORMERS[name].replace('eos', 'eos_token')
  found = templates.rendered(text, TALK[1:4], ('<s>', '</s>'), 'a')
  assert found == wanted[name]


@pytest.mark.hf
@pytest.mark.parametrize('name', OF_TRANSFORMERS)
def test_templates_are_as_in_transformers(name):
  utils = pytest.importorskip('transformers.utils.chat_template_utils')
  text = OF_TRANSFORMERS[name].replace('eos', 'eos_token')
  (wanted,), _ = utils.render_jinja_template(
    [TALK[1:4]], chat_template=text, bos_token='<s>', eos_token='</s>'
  )
  found = templates.rendered(text, TALK[1:4], ('<s>', '</s>'), 'a')
  assert found == wanted


def test_a_template_knows_the_day():
  text = "{{ strftime_now('%Y-%m-%d') }}"
  before = datetime.datetime.now()
  found = templates.rendered(text, TALK, ('', ''), 'a')
  after = datetime.datetime.now()
  assert found in {f'{x:%Y-%m-%d}' for x in (before, after)}


def test_training_text_is_that_of_every_day(tmp_path, monkeypatch):
  """Of NOW; a cache of another NOW is not taken, where it is written."""
  path = write(tmp_path / 'a.jsonl', [TALK])
  day = "{{ strftime_now('%Y-%m-%d') }}"
  _, t, made = build(path, tmp_path, template=day + PLAIN)
  assert t.decode(made.tokens) == '2024-07-26' + by_hand(TALK)[0]
  _, _, plain = build(path, tmp_path, template=PLAIN)
  later = datetime.datetime(2030, 1, 2)
  monkeypatch.setattr(chat, 'NOW', later)
  _, _, new = build(path, tmp_path, template=day + PLAIN)
  assert t.decode(new.tokens).startswith('2030-01-02')
  assert new.fingerprint != made.fingerprint
  _, _, again = build(path, tmp_path, template=PLAIN)
  assert again.fingerprint == plain.fingerprint


def test_a_template_beside_a_tokenizer_has_its_own_cache(tmp_path):
  """The text may be that of another run, of the same tokenizer's content."""
  path = write(tmp_path / 'a.jsonl', [TALK])
  special_tokenizer(tmp_path)
  own = tmp_path / 'tokenizer.json'
  made, about = [], (tmp_path / 'tokenizer_config.json').read_text()
  for name, template in (('x', PLAIN), ('y', CHATML), ('z', PLAIN)):
    (tmp_path / name).mkdir()
    file = tmp_path / name / 'tokenizer.json'
    shutil.copy(own, file)
    (tmp_path / name / 'tokenizer_config.json').write_text(about)
    (tmp_path / name / 'chat_template.jinja').write_text(template)
    _, _, found = build(path, tmp_path, tokenizer=str(file))
    made.append(found.folder)
  assert made[0] == made[2] != made[1] and all(x.exists() for x in made)


def test_tokens_beside_conversations_count_whole(tmp_path):
  """As plain text does."""
  folder = tmp_path / 'text'
  folder.mkdir()
  write(folder / 'a.jsonl', [TALK])
  t = tokenizer.load('bytes')
  ids = [*t.encode('some text'), t.end_id]
  np.asarray(ids, '<u2').tofile(folder / 'b.bin')
  _, _, made = build(folder, tmp_path, template=PLAIN)
  loss = np.split(made.loss, made.starts[1:-1])
  assert made.domains == ('a', 'b') and made.domain_ids.tolist() == [0, 1]
  assert 0 < loss[0].sum() < len(loss[0])
  assert loss[1].tolist() == [1] * len(ids)


def test_a_cache_below_conversations_is_no_text(tmp_path):
  folder = tmp_path / 'text'
  folder.mkdir()
  write(folder / 'a.jsonl', [TALK])
  _, _, made = build(folder, folder, template=PLAIN)
  assert (made.folder / 'loss.bin').exists()
  for path in (folder, folder / '**'):
    found = corpus.source_files(str(path))
    assert [s.file.name for s in found] == ['a.jsonl']
  _, _, again = build(folder, folder, template=PLAIN)
  assert again.fingerprint == made.fingerprint


def test_what_is_missing(tmp_path, monkeypatch):
  path = write(tmp_path / 'a.jsonl', [TALK])
  with support.refused("tokenizer 'bytes' has none beside it", 'chat_template'):
    build(path, tmp_path)
  with support.refused("data.chat_template='none.jinja' cannot be read"):
    build(path, tmp_path, chat_template='none.jinja')
  text = tmp_path / 'text.jsonl'
  text.write_text('{"text": "a"}\n{"messages": []}\n')
  with support.refused("data.loss_on='assistant' is for conversations"):
    build(text, tmp_path)
  with support.refused('text.jsonl:2: has "messages", the first line'):
    build(text, tmp_path, loss_on='all')
  # Its text is what is read of a row that has both.
  text.write_text(json.dumps({'messages': TALK, 'text': 'a'}) + '\n')
  with support.refused('"messages" and no "text" in its first line'):
    build(text, tmp_path)
  _, _, both = build(text, tmp_path, loss_on='all')
  assert both.tokens.tolist() == [258, *b'a', 257]
  with support.refused("tokenizer 'bytes' has none beside it"):
    build(text, tmp_path, text_key='body')
  templates._compiled.cache_clear()
  monkeypatch.setitem(sys.modules, 'jinja2', None)
  with support.refused("pip install 'paraxis[chat]'"):
    build(path, tmp_path, template=PLAIN + ' ')
