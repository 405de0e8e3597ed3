"""The three kinds of vocabulary: round trips, special tokens, streaming."""

import codecs
import dataclasses
import json
import os
import pathlib

import pytest
import support
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import processors

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models.text import chat
from paraxis.models.text import tokenizer

TEXTS = (
  '',
  'plain words, and  two   spaces\n\n\ttabs\r\n',
  'def f(x):\n    return x ** 2  # 12345',
  'naïve café Ω',
  '日本語のテキスト и русский العربية',
  'emoji 😀👩‍👩‍👧 and \x00\x01 controls',
  '<|end|> <|pad|><|code|> are only text here',
)


@pytest.mark.parametrize('name', ['bpe2048', 'bytes'])
@pytest.mark.parametrize('text', TEXTS)
def test_round_trip(name, text):
  t = tokenizer.load(name)
  ids = t.encode(text)
  assert t.decode(ids) == text
  assert t.decode_bytes(ids) == text.encode()
  assert t.encode_batch([text, 'x']) == [ids, t.encode('x')]
  # No special token comes out of text, whatever the text spells.
  special = {t.pad_id, t.end_id, t.bos_id(), *map(t.bos_id, t.domains)}
  assert not special & set(ids)
  # ... and special tokens put around it do not show.
  assert t.decode([t.bos_id(), *ids, t.end_id, t.pad_id]) == text


@pytest.mark.parametrize('name', ['bpe2048', 'bytes'])
def test_streaming_never_splits_a_character(name):
  t = tokenizer.load(name)
  text = ''.join(TEXTS)
  stream = codecs.getincrementaldecoder('utf-8')('replace')
  parts = [stream.decode(t.decode_bytes([i])) for i in t.encode(text)]
  assert ''.join(parts) + stream.decode(b'', final=True) == text
  # The negative: decoding token by token does split characters.
  assert ''.join(t.decode([i]) for i in t.encode(text)) != text


def test_shipped_vocabulary():
  t = tokenizer.load('bpe2048')
  assert t.vocab_size == 2048
  assert t.domains == (
    'code',
    'dictionary',
    'drama',
    'manual',
    'scripture',
    'translation',
  )
  assert (t.pad_id, t.end_id) == (0, 1)
  assert [t.bos_id(d) for d in t.domains] == [2, 3, 4, 5, 6, 7]
  assert t.bos_id() == t.bos_id('no such domain') == t.bos_id('code')
  assert t.bos_id('pad') == t.bos_id()  # a control token is no domain
  assert t.require_domain('drama') == 'drama'
  with pytest.raises(errors.UserError, match="'dramma'.*mean 'drama'"):
    t.require_domain('dramma')


def test_bytes_vocabulary():
  t = tokenizer.load('bytes')
  assert (t.vocab_size, t.pad_id, t.end_id, t.bos_id('x')) == (
    259,
    256,
    257,
    258,
  )
  assert t.domains == ()
  assert t.fingerprint != tokenizer.load('bpe2048').fingerprint


def save(folder, entries, special):
  """A word-level tokenizer.json with these entries."""
  made = tokenizers.Tokenizer(
    models.WordLevel({w: i for i, w in enumerate(entries)}, unk_token='?')
  )
  made.decoder = decoders.Sequence(
    [
      decoders.Replace('\u2581', ' '),
      decoders.ByteFallback(),
      decoders.Fuse(),
    ]
  )
  made.add_special_tokens(special)
  path = folder / 'tokenizer.json'
  made.save(str(path))
  return str(path)


def test_any_tokenizer_json(tmp_path):
  entries = ['?', '\u2581a', '<0xE6>', '<0x97>', '<0xA5>']
  path = save(tmp_path, entries, ['<bos>', '<eos>'])
  t = tokenizer.load(path)
  assert t.vocab_size == 7
  assert t.bos_id('anything') == 5
  assert t.pad_id == t.end_id == 6  # it has no padding token
  assert t.decode_bytes([5, 1, 2, 3, 4, 6]) == ' a日'.encode()
  assert t.decode([5, 1, 2, 3, 4, 6]) == ' a日'
  assert t.fingerprint == tokenizer.load(path).fingerprint


def test_files_at_home(tmp_path, monkeypatch):
  save(tmp_path, ['?', 'a'], [])
  (tmp_path / 'chat_template.jinja').write_text('beside')
  (tmp_path / 'own.jinja').write_text('own')
  monkeypatch.setenv('HOME', str(tmp_path))
  data = schema.Data(tokenizer='~/tokenizer.json')
  assert tokenizer.load(data.tokenizer).vocab_size == 2
  assert chat.template(data) == 'beside'
  own = dataclasses.replace(data, chat_template='~/own.jinja')
  assert chat.template(own) == 'own'


def test_missing_special_tokens_are_named(tmp_path):
  t = tokenizer.load(save(tmp_path, ['?', 'a'], []))
  with pytest.raises(errors.UserError, match='no beginning-of-document token'):
    t.bos_id()
  with pytest.raises(errors.UserError, match='end-of-document.*2 entries'):
    _ = t.end_id


SENTENCE = '<\uff5cend\u2581of\u2581sentence\uff5c>'  # DeepSeek


@pytest.mark.parametrize(
  'special, eos, wanted',
  [
    (['<bos>', SENTENCE], SENTENCE, 3),
    (['<BOS_TOKEN>', '<|END_OF_TURN_TOKEN|>'], '<|END_OF_TURN_TOKEN|>', 3),
    (['<bos>', SENTENCE], dict(content=SENTENCE), 3),
    (['<bos>', SENTENCE], 3, 3),
    (['</s>', SENTENCE], SENTENCE, 2),  # a known name goes first
    (['<bos>', SENTENCE], 'a', None),  # text may have it
    (['<bos>', SENTENCE], '<|unknown|>', None),
    (['<bos>', SENTENCE], '', None),
  ],
)
def test_the_end_that_files_state(tmp_path, special, eos, wanted):
  path = save(tmp_path, ['?', 'a'], special)
  if not isinstance(eos, int):
    (tmp_path / tokenizer.STATED).write_text(json.dumps(dict(eos_token=eos)))
    made = tokenizer.load(path)
    if wanted is None:
      with support.refused('{"eos_token": TEXT}', 'tokenizer_config.json'):
        _ = made.end_id
    else:
      assert made.end_id == made.pad_id == wanted
    assert made.last == (wanted if wanted == 3 else None)
  # ... and what is written beside a run's says it too.
  file, text = tmp_path / 'run' / 'tokenizer.json', pathlib.Path(path)
  file.parent.mkdir()
  eos = eos['content'] if isinstance(eos, dict) else eos
  tokenizer.keep(text.read_text(), file, eos=[eos])
  of_weights = 3 if wanted else None  # whatever else is called by its name
  assert tokenizer.load(str(file)).last == of_weights
  assert file.with_name(tokenizer.STATED).exists() == bool(wanted)


ENDOFTEXT, START = '<|endoftext|>', '<|startoftext|>'


@pytest.mark.parametrize(
  'special, bos, adds, template, wanted',
  [
    # Granite 3: no name is known, and nothing is added.
    (['<|end_of_text|>', '<|start_of_role|>'], 2, False, '', 2),
    # Cohere
    (['<PAD>', '<BOS_TOKEN>', '<|START_OF_TURN_TOKEN|>'], 3, None, '', 3),
    # LFM2, Jamba: a name is known, and is another.
    ([ENDOFTEXT, START], 3, True, '', 3),
    ([ENDOFTEXT, START], START, True, '', 3),
    ([ENDOFTEXT, START], 3, None, START, 3),
    # SmolLM2's is that of its turns, and no text begins with it.
    ([ENDOFTEXT, '<|im_start|>'], 3, False, '', 2),
    ([ENDOFTEXT, '<|im_start|>'], 3, None, '', 2),
    # GPT-2, Qwen2
    ([ENDOFTEXT], 2, None, '', 2),
    ([ENDOFTEXT, '<|im_start|>'], None, None, '', 2),
    # Ids that are none of a special token.
    (['<bos>'], 1, True, '', 2),
    (['<bos>'], 9, True, '', 2),
    (['<bos>'], '<s>', True, '', 2),
  ],
)
def test_what_a_document_of_other_weights_begins_with(
  tmp_path, special, bos, adds, template, wanted
):
  text = pathlib.Path(save(tmp_path, ['?', 'a'], special)).read_text()
  if template:
    made = tokenizers.Tokenizer.from_str(text)
    made.post_processor = processors.TemplateProcessing(
      f'{template} $A', special_tokens=[(template, 3)]
    )
    text = made.to_str()
  (tmp_path / 'run').mkdir()
  file = tmp_path / 'run' / 'tokenizer.json'
  for _ in range(2):  # what is there of other weights goes
    tokenizer.keep(text, file, [bos], adds)
    assert tokenizer.load(str(file)).bos_id() == wanted
    assert file.read_text() == text
    file.with_name(tokenizer.STATED).write_text(
      json.dumps(dict(add_bos_token=True, bos_token=dict(content=special[-1])))
    )
    assert tokenizer.load(str(file)).bos_id() == 1 + len(special)


def test_control_tokens_of_others_are_no_domains_of_ours(tmp_path):
  path = save(tmp_path, ['?'], ['<|assistant|>', '<|user|>'])
  with pytest.raises(errors.UserError, match='no beginning-of-document token'):
    tokenizer.load(path).bos_id()
  path = save(tmp_path, ['?'], ['<|poem|>', '<|essay|>', '<|end|>'])
  assert tokenizer.load(path).bos_id() == 2


def test_two_may_write_one_file(tmp_path, monkeypatch):
  """Processes of two containers, which have the same number."""
  file, replace, others = tmp_path / 'a.json', os.replace, ['theirs']

  def later(*paths):
    if others:
      tokenizer.put(file, others.pop())
    replace(*paths)

  monkeypatch.setattr(os, 'replace', later)
  tokenizer.put(file, 'ours')
  assert file.read_text() == 'ours' and list(tmp_path.iterdir()) == [file]


def test_bad_names(tmp_path):
  with pytest.raises(errors.UserError, match="mean 'bpe2048'"):
    tokenizer.load('bpe204')
  damaged = tmp_path / 'tokenizer.json'
  damaged.write_text('{"model": {}}')
  with pytest.raises(errors.UserError, match='is not a tokenizer.json'):
    tokenizer.load(str(damaged))
  damaged.write_bytes(b'\xff\xfe')
  with pytest.raises(errors.UserError, match='is not a tokenizer.json'):
    tokenizer.load(str(damaged))
