"""What real folders state, and what of it is so: tokens, tied heads.

Special tokens, and what the files say of them, are those of released weights;
a Llama of one layer stands for their model.
"""

import importlib.util
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors
import support
import tokenizers
from tokenizers import models
from tokenizers import processors

from paraxis.configs import schema
from paraxis.decode import chat
from paraxis.decode import load
from paraxis.decode import loop
from paraxis.decode.evaluate import score
from paraxis.models.huggingface import files as files_lib
from paraxis.models.huggingface import source
from paraxis.models.text import chat as templates
from paraxis.models.text import tokenizer
from paraxis.train import exchange
from paraxis.train.data import pieces
from paraxis.train.data import rows
from paraxis.train.run import origin

ROWS, WIDTH = 8, 8
BEGIN = '<\uff5cbegin\u2581of\u2581sentence\uff5c>'  # DeepSeek
END = '<\uff5cend\u2581of\u2581sentence\uff5c>'


def quiet(line):
  del line


def tensors():
  """{name: array} of a Llama of one layer, its head its embedding."""
  layer, square = 'model.layers.0.', (WIDTH, WIDTH)
  shapes = {
    'model.embed_tokens.weight': (ROWS, WIDTH),
    'model.norm.weight': (WIDTH,),
    f'{layer}input_layernorm.weight': (WIDTH,),
    f'{layer}post_attention_layernorm.weight': (WIDTH,),
  }
  shapes |= {f'{layer}self_attn.{x}_proj.weight': square for x in 'qkvo'}
  shapes |= {
    f'{layer}mlp.{x}_proj.weight': square for x in ('gate', 'up', 'down')
  }
  rng = np.random.default_rng(0)
  return {n: rng.normal(size=s).astype('f4') for n, s in shapes.items()}


def spelled(special, first=()):
  """Text of a tokenizer.json: '?' 0, 'a' 1, then the special tokens; first:
  those that its post-processor puts in front."""
  made = tokenizers.Tokenizer(models.WordLevel({'?': 0, 'a': 1}, unk_token='?'))
  made.add_special_tokens(list(special))
  if first:
    made.post_processor = processors.TemplateProcessing(
      ' '.join((*first, '$A')),
      special_tokens=[(x, made.token_to_id(x)) for x in first],
    )
  return made.to_str()


def folder(path, text, config=None, stated=None, generation=None, more=()):
  """A folder of Hugging Face. text: of its tokenizer.json; config, stated,
  generation: fields of its .json files. more: tensors beside its own."""
  path.mkdir(exist_ok=True)
  own = dict(
    model_type='llama', vocab_size=ROWS, hidden_size=WIDTH,
    intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=2,
    tie_word_embeddings=True,
  )  # fmt: skip
  for name, content in (
    ('config', own | (config or {})),
    ('tokenizer_config', stated or {}),
    ('generation_config', generation or {}),
  ):
    (path / f'{name}.json').write_text(json.dumps(content))
  (path / 'tokenizer.json').write_text(text)
  held = tensors() | dict(more)
  safetensors.save_file(held, str(path / 'model.safetensors'))
  return path


def kept(path, begun=False):
  """The tokenizer that a run of a folder's weights has."""
  file = path / 'run' / 'tokenizer.json'
  file.parent.mkdir(exist_ok=True)
  source.Source(path).keep_tokenizer(file, begun, quiet)
  return tokenizer.load(str(file))


def test_a_tokenizer_knows_its_bos_better_than_config_json(tmp_path):
  """DeepSeek-R1-Distill-Qwen: config.json has ids of the model that it began
  with, of which one is the end of its own tokenizer."""
  text = spelled([END, BEGIN], [BEGIN])
  ids = dict(bos_token_id=2, eos_token_id=2)
  said = dict(add_bos_token=True, bos_token=dict(content=BEGIN), eos_token=END)
  assert kept(folder(tmp_path, text, ids, said)).bos_id() == 3
  # What the tokenizer states is no token of its own, or nothing.
  for bos in ('<s>', None):
    assert (
      kept(folder(tmp_path, text, ids, said | dict(bos_token=bos))).first == 2
    )
  # A run that began with another one goes on with it.
  folder(tmp_path, text, ids, said)
  assert kept(tmp_path, begun=True).bos_id() == 2
  assert source.Source(tmp_path).about['bos'] == 2


EMBEDDING = 'model.embed_tokens.weight'


@pytest.mark.parametrize('dtype', ['float32', ml_dtypes.bfloat16])
def test_a_head_of_its_own_is_none_that_is_tied(tmp_path, monkeypatch, dtype):
  """A copy is passed over; trained apart, it would be dropped."""
  monkeypatch.setattr(files_lib, '_COMPARED', 3 * WIDTH)  # blocks of rows
  head = tensors()[EMBEDDING].astype(dtype)
  more = {'lm_head.weight': head, EMBEDDING: head}
  text = spelled([END, BEGIN])
  with load.Weights(folder(tmp_path, text, more=more), quiet):
    pass
  other = head.copy()
  other[-1, -1] += 1
  for x in (other, head[1:]):
    folder(tmp_path, text, more=more | {'lm_head.weight': x})
    with support.refused('lm_head.weight is not', 'tie_word_embeddings=false'):
      load.Weights(tmp_path, quiet)
    with support.refused('lm_head.weight is not'):
      origin.Foreign(str(tmp_path)).configured(
        schema.Config(), tmp_path / 'run', quiet
      )
  # Untied it is read, and a run that began before goes on.
  folder(tmp_path, text, dict(tie_word_embeddings=False), more=more)
  with load.Weights(tmp_path, quiet):
    pass
  monkeypatch.setattr(origin.Foreign, '_check_run', lambda *given: True)
  folder(tmp_path, text, more=more | {'lm_head.weight': other})
  (tmp_path / 'run').mkdir()
  found = origin.Foreign(str(tmp_path)).configured(
    schema.Config(), tmp_path / 'run', quiet
  )
  assert found.model.tied_embedding


def ends(path):
  """(texts of the tokens that a text of a folder's weights ends with, the first
  that of a document; eos_token of a template)."""
  made = kept(path)
  ids = *loop.end_ids(made), *source.Source(path).about['ends']
  shown = chat.Chat(made, '{{ eos_token }}{{ messages[1:] }}')
  text = templates.rendered(shown._template, [], shown._specials, 'test')
  return [made.name_of(i) for i in dict.fromkeys(ids)], text.removesuffix('[]')


def test_ends_that_are_stated_are_the_ends(tmp_path):
  """Of gpt-oss a known name ends a message, behind which the answer comes; that
  of Phi-3 is not the one that its template writes."""
  special = ['<|endoftext|>', '<|return|>', '<|end|>', '<|call|>']
  stated, generation = {'eos_token': '<|return|>'}, {'eos_token_id': [3, 2, 5]}
  folder(
    tmp_path / 'gpt', spelled(special), dict(eos_token_id=3), stated, generation
  )
  names = ['<|return|>', '<|endoftext|>', '<|call|>']
  assert ends(tmp_path / 'gpt') == (names, '<|return|>')
  special, generation = ['<|endoftext|>', '<|end|>'], {'eos_token_id': [2, 3]}
  stated = {'eos_token': special[0]}
  folder(tmp_path / 'phi', spelled(special), None, stated, generation)
  assert ends(tmp_path / 'phi') == (special, special[0])
  # By its id alone; else by its name.
  folder(tmp_path / 'phi', spelled(special), dict(eos_token_id=2))
  assert ends(tmp_path / 'phi') == (special[:1], special[0])
  folder(tmp_path / 'phi', spelled(special))
  assert ends(tmp_path / 'phi') == (special[1:], special[1])


def test_a_run_of_before_ends_as_it_did(tmp_path):
  """Documents of its tokens end with the known name."""
  text = spelled(['<|endoftext|>', '<|end|>'])
  folder(tmp_path, text, dict(eos_token_id=2), {'eos_token': '<|endoftext|>'})
  assert kept(tmp_path).last == kept(tmp_path, begun=True).last == 2
  (tmp_path / 'run' / 'tokenizer_config.json').unlink()
  assert kept(tmp_path, begun=True).last is None
  # The file itself, named in data.tokenizer, has no word of it either.
  assert tokenizer.load(str(tmp_path / 'tokenizer.json')).last is None


def test_special_tokens_that_have_no_row(tmp_path):
  """All files of Gemma 3 without images name that of an image, whose id is the
  number of rows."""
  names = ['<bos>', '<eos>', '<pad>', 'x4', 'x5', 'x6', '<image>', '<video>']
  stated, said = dict(bos_token='<bos>', add_bos_token=True), []
  folder(tmp_path, spelled(names), None, stated)
  for _ in range(2):  # of a run and of nothing but decoding
    with load.Weights(tmp_path, said.append) as weights:
      config = schema.view(weights.config())
      built, _, made, _ = weights.parts(config)
      assert made.vocab_size == ROWS == built.model.config.vocab_size
    assert len([x for x in said if '<image>, <video> (2 special' in x]) == 1
    said.clear()
  assert kept(tmp_path).left_out == ('<image>', '<video>')
  assert made.decode_bytes([8, 9, 1]) == b'a' and not made.is_ordinary(8)
  with support.refused("the special token '<image>'"):
    templates.check_spelling('an <image>', made.specials, 'it')
  # What was read there before had other tokens.
  folder(tmp_path, spelled(names[:5]), None, stated)
  assert not kept(tmp_path).left_out


@pytest.mark.parametrize(
  'stated, added',
  [
    (dict(bos_token='<image>', add_bos_token=True), []),
    (dict(eos_token='<image>'), []),
    ({}, ['ordinary']),
  ],
)
def test_what_texts_have_needs_its_row(tmp_path, stated, added):
  names = ['<bos>', 'x3', '<pad>', 'x4', 'x5', 'x6', '<image>']
  made = tokenizers.Tokenizer.from_str(spelled(names))
  made.add_tokens(added)
  with load.Weights(folder(tmp_path, made.to_str(), None, stated)) as weights:
    with support.refused(f'has {9 + len(added)} ids, the weights 8'):
      weights.parts(schema.view(weights.config()))


def test_layers_that_predict_later_tokens(tmp_path):
  """Qwen3-Next has them by a name, DeepSeek-V3 and GLM-4.5 behind the last."""
  names = [
    'mtp.fc.weight', 'mtp.layers.0.mlp.gate.weight',
    'model.mtp_emb_norm.weight', 'model.layers.1.eh_proj.weight',
    'model.layers.1.mlp.experts.7.up_proj.weight',
  ]  # fmt: skip
  text, said = spelled([END, BEGIN]), []
  more = {name: np.ones((2, 2), 'f4') for name in names}
  count = dict(num_nextn_predict_layers=1)
  with load.Weights(folder(tmp_path, text, count, more=more), said.append):
    pass
  (tmp_path / 'run').mkdir()
  origin.Foreign(str(tmp_path)).configured(
    schema.Config(), tmp_path / 'run', said.append
  )
  lines = [x for x in said if '5 tensors of layers that predict later' in x]
  assert len(lines) == 2 and names[3] in lines[0]
  # Layers that nobody counts, or a next one, are none of them.
  with support.refused('has, unused, 2', names[3]):
    source.Source(folder(tmp_path, text, more=more))
  more['model.layers.2.eh_proj.weight'] = np.ones(2, 'f4')
  with support.refused('has, unused, 1', 'layers.2.eh_proj'):
    source.Source(folder(tmp_path, text, count, more=more))


def test_a_text_of_glm_begins_with_two_tokens(tmp_path):
  """No file names them but the post-processor of tokenizer.json."""
  names = ['<|endoftext|>', '[gMASK]', '<sop>', '<|user|>']
  text, said = spelled(names, names[1:3]), dict(eos_token=names[0])
  made = kept(folder(tmp_path, text, dict(eos_token_id=[2, 5]), said))
  assert made.opening() == [3, 4] and made.opening('user') == [5]
  row = rows.Row('code', '1', 'train', 'a')
  pieces_of = pieces._encoded([row], made)
  assert [ids for _, ids, _, _ in pieces_of] == [[3, 4, 1, 2]]
  assert chat.Chat(made, 'a').ids([]) == [3, 4, 1]
  assert not chat.Chat(made, 'a', begins=False).ids([])[1:]
  with load.Weights(tmp_path, quiet) as weights:
    config = schema.view(weights.config())
    found = weights.generator(config)
    assert found._encode(['aa a'], [None])[0][:3] == [3, 4, 0]
    scorer = score.Scorer(weights.parts(config), config.decode, 4, say=quiet)
  asked = []
  scorer.scores = lambda pairs: (
    asked.extend(pairs) or [score.Score(1.0, len(b), True, 0) for _, b in pairs]
  )
  scorer.rolling(['a'], made.opening())
  assert asked == [([3, 4], [1])]
  asked.clear()
  scorer.tokenizer.encode = lambda text: list(range(9))
  scorer.rolling([''], made.opening())
  assert asked == [
    ([3, 4], [0, 1, 2]), ([2], [3, 4, 5, 6]), ([4, 5, 6], [7, 8]),
  ]  # fmt: skip
  # Where a file says that nothing is added, it is not.
  folder(tmp_path, text, None, said | dict(add_bos_token=False))
  assert kept(tmp_path).opening() == [2]
  # An export has the post-processor, and a word of another would change it.
  folder(tmp_path, text, None, said | dict(bos_token=names[0]))
  assert kept(tmp_path).prefix == (3, 4)
  file = str(tmp_path / 'run' / 'tokenizer.json')
  config = schema.with_value(schema.Config(), 'data.tokenizer', file)
  about = dict(bos=None, ends=[2], template='')
  exchange._write_tokenizer(tmp_path, config, about, quiet)
  written = json.loads((tmp_path / 'tokenizer_config.json').read_text())
  assert written['eos_token'] == names[0]
  assert not {'bos_token', 'add_bos_token'} & {*written}
  assert kept(tmp_path).prefix == (3, 4)


NAMES = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']  # ids 2, 3, 4
CHATML = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content"
  " + '<|im_end|>' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)


def base(path, template='old'):
  """A folder whose model has learned no <|im_end|>."""
  stated = dict(eos_token=NAMES[0], chat_template=template)
  ids = dict(eos_token_id=2, bos_token_id=3)
  return folder(path, spelled(NAMES), ids, stated)


@pytest.fixture
def tuned(tmp_path, monkeypatch):
  """(its template's file, the export of a run that data.chat_template named
  it in, of a folder with another)."""
  file, configured = tmp_path / 'chatml.jinja', origin.Foreign.configured
  file.write_text(CHATML)

  def change(*given):
    made = configured(*given)
    return schema.with_value(made, 'data.chat_template', str(file))

  monkeypatch.setattr(origin.Foreign, 'configured', change)
  exchange.bring(str(base(tmp_path / 'base')), tmp_path / 'a', quiet)
  exchange.send(str(tmp_path / 'a'), tmp_path / 'out', say=quiet)
  return file, tmp_path / 'out'


def written(path):
  """(config.json, tokenizer_config.json) of a folder."""
  files = 'config.json', 'tokenizer_config.json'
  return [json.loads((path / name).read_text()) for name in files]


def test_an_export_has_the_template_of_its_run(tuned, tmp_path):
  """And ends where it ends an answer; its documents end as they did."""
  file, out = tuned
  config, stated = written(out)
  assert stated['chat_template'] == CHATML
  assert config['eos_token_id'] == [2, 4] and stated['eos_token'] == NAMES[0]
  assert ends(out) == ([NAMES[0], NAMES[2]], NAMES[0])
  file.unlink()
  with support.refused(f'{file}', 'cannot be read', 'put the file back'):
    exchange.send(str(tmp_path / 'a'), tmp_path / 'b', say=quiet)
  assert not (tmp_path / 'b').exists()


def test_what_reads_no_template_is_said(tuned, tmp_path, monkeypatch):
  find, said = importlib.util.find_spec, []
  for missing in (False, True):
    monkeypatch.setattr(
      importlib.util,
      'find_spec',
      lambda name, *of, no=missing: (
        None if no and name == 'jinja2' else find(name, *of)
      ),
    )
    exchange.send(str(tmp_path / 'a'), tmp_path / f'{missing}', say=said.append)
    assert any('takes jinja2' in line for line in said) == missing


@pytest.mark.hf
def test_transformers_talks_as_the_run_did(tuned):
  """The prompt that it makes, and where its answers end."""
  import hf_peer  # skips without torch

  _, out = tuned
  made = hf_peer.transformers.AutoTokenizer.from_pretrained(out)
  turns = [dict(role='user', content='a')]
  wanted = templates.rendered(CHATML, turns, ('', NAMES[0]), 'test', ask=True)
  found = made.apply_chat_template(
    turns, tokenize=False, add_generation_prompt=True
  )
  assert found == wanted and made.eos_token == NAMES[0]
  config = hf_peer.transformers.AutoConfig.from_pretrained(out)
  how = hf_peer.transformers.GenerationConfig.from_model_config(config)
  assert how.eos_token_id == [2, 4]


def test_their_own_tokenizer_by_its_path_is_theirs(tmp_path):
  """Wherever it lies: its content says it. Of another nothing is known."""
  path, copy = base(tmp_path / 'base', CHATML), tmp_path / 'copy.json'
  copy.write_text((path / 'tokenizer.json').read_text())
  for n, file in enumerate((path / 'tokenizer.json', copy)):
    exchange.bring(str(path), tmp_path / f'{n}', quiet, str(file))
    about = origin.Run(str(tmp_path / f'{n}')).about
    assert (about['ends'], about['bos']) == ([2], 3)
    assert about['template'] == CHATML
    exchange.send(str(tmp_path / f'{n}'), tmp_path / f'out{n}', say=quiet)
    config, stated = written(tmp_path / f'out{n}')
    assert config['eos_token_id'] == [2, 4] and config['bos_token_id'] == 3
    assert stated['chat_template'] == CHATML
  copy.write_text(spelled(NAMES[::-1]))
  exchange.bring(str(path), tmp_path / 'other', quiet, str(copy))
  about = origin.Run(str(tmp_path / 'other')).about
  assert {name: about[name] for name in origin.OTHER} == origin.OTHER
