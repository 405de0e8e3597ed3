"""The cache changes nothing: neither lengths, nor batches, nor the mesh."""

import dataclasses
import functools

import decode_cases
import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import loop
from paraxis.decode import step
from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models.text import tokenizer
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import compiling
from paraxis.sharding.meter import narrow

MESH = 'data=2,fsdp=2,tensor=2'
TINY = dict(
  vocab_size=264,
  d_model=16,
  num_layers=2,
  num_heads=4,
  d_ff=32,
  embedding_init_std=1.0,
  tied_embedding=False,
)
MODELS = {
  'rope': {},
  'windows, grouped, capped': dict(
    num_layers=3,
    pattern='WFN',
    window=5,
    num_kv_heads=2,
    qk_norm='head',
    attention_softcap=5.0,
    logit_softcap=9.0,
    norm_placement='sandwich',
    sinks=True,
  ),
  'learned': dict(
    position='learned',
    max_positions=40,
    norm='layernorm',
    mlp='gelu',
    attention_bias=True,
    attention_output_bias=True,
    tied_embedding=True,
  ),
}


def made(mesh='', devices=1, **model):
  # As decode/load.py does: one token has no shards of a length.
  config = schema.view({'model': TINY | model, 'mesh': dict(sequence=False)})
  built = build.build(config, mesh, devices=jax.devices()[:devices])
  with build.use(built):
    params = jax.jit(lambda: built.model.init(jax.random.key(1)))()
  return built, params


def generator(built, params, **decode):
  config = dataclasses.replace(schema.Decode(), **decode)
  quiet = lambda line: None
  return loop.Generator(built, params, tokenizer.Bytes(), config, quiet)


@pytest.mark.parametrize('name', MODELS)
def test_cached_logits_are_uncached_ones(name):
  """Prompts of different lengths, float64, every position."""
  lengths, length = (7, 1, 8), 19
  ids = np.random.default_rng(0).integers(0, 264, (3, length)).astype('i4')
  wide = dict(dtype='float64', param_dtype='float64')
  with jax.enable_x64(True):
    model = decoder.Decoder(schema.Model(**TINY | MODELS[name] | wide))
    params = module_cases.parameters(model, 0.3)
    want = module_cases.logits(model, params, ids)
    prompts = model, model.unstack(params), ids, lengths
    (prompt, *steps), _ = module_cases.decoded(*prompts, 11)
    _, cache = module_cases.decoded(*prompts, 0)
    at, live = np.array(lengths, np.int32), np.ones(3, bool)
    advance = jax.jit(functools.partial(step.advance, model))
    off = cache._replace(length=cache.length - 1)
    off = np.asarray(advance(prompts[1], off, ids[[0, 1, 2], at], live)[0])
  for b, n in enumerate(lengths):
    np.testing.assert_allclose(prompt[b, :n], want[b, :n], atol=1e-10)
    found = [z[b] for z in steps]
    np.testing.assert_allclose(found, want[b, n : n + 11], atol=1e-10)
  # A row that is one token shorter is seen.
  right = want[np.arange(3), lengths]
  assert np.abs(off - right).max(1).min() > 1e-3


@support.compiles('tpu')
def test_a_step_for_a_tpu_runs_the_kernel_in_every_layer():
  """Full, windowed, latent attention and that within chunks."""
  config = schema.view(
    {'model': TINY | dict(num_layers=4, pattern='FWAC', window=9)}
  )
  model = build.build(config, '', devices=jax.devices()[:1]).model
  t = aot.topology('v5e:1x1')
  one = jax.sharding.SingleDeviceSharding(t.devices[0])

  def run(params, tokens, lengths):
    loose = model.unstack(params)
    _, cache = step.prefill(model, loose, tokens, lengths, 48)
    return step.advance(model, loose, cache, lengths, lengths > 0)[0]

  shape = lambda *s: jax.ShapeDtypeStruct(s, 'int32', sharding=one)
  with t.context():
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    params = {
      p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one)
      for p, x in params.items()
    }
    args = params, shape(3, 32), shape(3)
    text = jax.jit(run).trace(*args).lower().as_text()
  assert text.count('kernel_name = "decode_attention_tpu"') == 4


PROMPTS = ['And it came to pass', 'x', 'def f(n):']
SAMPLED = dict(temperature=1.1, top_k=50, top_p=0.95, seed=4)


@pytest.fixture(scope='module')
def one():
  return generator(*made(num_kv_heads=2), max_new_tokens=20)


def tokens(results):
  return [r['tokens'] for r in results]


@pytest.mark.parametrize(
  'mesh, said',
  [
    (MESH, ['4 batch shards, prompts: 3, empty rows added: 1']),
    # Two kv heads on four shards: every shard holds both of them.
    ('tensor=4', []),
  ],
)
def test_sharded_is_one_device_token_for_token(one, mesh, said):
  built, params = made(mesh, 8 if mesh == MESH else 4, num_kv_heads=2)
  lines = []
  many = loop.Generator(
    built, params, tokenizer.Bytes(), one.config, lines.append
  )
  got = many.generate(PROMPTS, **SAMPLED)
  want = one.generate(PROMPTS, **SAMPLED)
  assert tokens(got) == tokens(want)
  assert len({t for row in tokens(got) for t in row}) > 8
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a['logprobs'], b['logprobs'], atol=1e-4)
  assert lines == said
  state = built.model.init_cache
  with build.use(built):
    keys = jax.jit(lambda: state(4, 8).states[0][0])()
  split = 'tensor' in str(jax.typeof(keys).sharding.spec)
  assert split == (mesh == MESH)


def test_a_row_is_what_it_is_alone(one):
  """A greedy row, a sampled row, and a plain loop without a cache."""
  together = tokens(one.generate(PROMPTS, temperature=0.0))
  alone = tokens(one.generate(PROMPTS[1:2], temperature=0.0))
  assert together[1:2] == alone
  some, first = (one.generate(p, **SAMPLED) for p in (PROMPTS, PROMPTS[:1]))
  assert some[0]['tokens'] == first[0]['tokens']
  built, params = made(num_kv_heads=2)
  model, ids = built.model, [258, *PROMPTS[1].encode()]
  order = np.arange(24, dtype=np.int32)[None]

  @jax.jit
  def whole(tokens, segments):
    batch = batch_lib.Batch(tokens, None, segments, order, None, None)
    return model.logits(params, model.features(params, batch)[0])

  with build.use(built):
    for _ in range(20):
      row = np.array([ids + [0] * (24 - len(ids))], np.int32)
      z = whole(row, (order < len(ids)).astype(np.int32))[0, len(ids) - 1]
      ids.append(int(np.argmax(z)))
  assert ids[2:] == together[1]


def test_stop_strings_end_and_limit(one):
  whole = one.generate(PROMPTS, **SAMPLED)
  assert [r['finish'] for r in whole] == ['length'] * 3
  assert [len(r['tokens']) for r in whole] == [20] * 3
  stop = whole[1]['text'][8:10]
  pieces = [''] * 3

  def show(row, piece):
    pieces[row] += piece

  cut = one.generate(PROMPTS, stop=[stop], on_text=show, **SAMPLED)
  assert pieces == [r['text'] for r in cut]
  for a, b in zip(cut, whole, strict=True):
    at = b['text'].find(stop)
    assert a['finish'] == ('stop' if at >= 0 else 'length')
    assert a['text'] == (b['text'][:at] if at >= 0 else b['text'])
  assert cut[1]['finish'] == 'stop'
  end, params = whole[1]['tokens'][6], made(num_kv_heads=2)[1]
  ending = loop.Generator(
    one.built, params, one.tokenizer, one.config, one._say, (end,)
  )
  short = ending.generate(PROMPTS, **SAMPLED)
  assert short[1]['finish'] == 'end'
  for a, b in zip(short, whole, strict=True):
    full = b['tokens']
    n = full.index(end) if end in full else 20
    assert a['tokens'] == full[:n]
    assert a['logprobs'] == b['logprobs'][:n]


def test_a_text_alone_is_no_list_of_its_letters(one):
  """As a stop it is one; as prompts it is refused."""
  (whole,) = one.generate(['x'], **SAMPLED)
  stop = 'none' + whole['text'][8:10]
  assert one.generate(['x'], stop=stop, **SAMPLED) == [whole]
  with support.refused('prompts is one text', 'list'):
    one.generate('KING.', **SAMPLED)


@pytest.mark.parametrize('mesh, devices', [('', 1), (MESH, 8)])
def test_logits_that_are_not_finite_end_the_decoding(
  monkeypatch, mesh, devices
):
  """A row that reads a poisoned embedding is named, and its text is kept."""
  built, params = made(mesh, devices, num_kv_heads=2)
  fields = dict(max_new_tokens=20, temperature=0.0)
  sound = generator(built, params, **fields).generate(PROMPTS)
  read = [
    {*p.encode(), *r['tokens']} for p, r in zip(PROMPTS, sound, strict=True)
  ]
  mine = sound[1]['tokens']
  bad = next(t for t in mine if t not in read[0] | read[2] | {*b'x'})
  step = mine.index(bad) + 1  # the step that reads it
  assert 0 < step < 20
  rows, laid = np.array(params['embedding']), params['embedding'].sharding
  rows[bad] = np.nan
  poisoned = params | {'embedding': jax.device_put(rows, laid)}
  pieces = [''] * 3

  def show(row, piece):
    pieces[row] += piece

  broken = generator(built, poisoned, **fields)
  for on_text in (None, show):
    with pytest.raises(errors.IntegrityError) as e:
      broken.generate(PROMPTS, on_text=on_text)
    assert f'row 1 at step {step} ' in str(e.value) and '\n' not in str(e.value)
    assert '1 of 3 rows' in str(e.value)
  assert pieces[1] == tokenizer.Bytes().decode(mine[:step])
  # Where rows end before that, nothing is wrong.
  fine = broken.generate(PROMPTS, max_new_tokens=step)
  assert tokens(fine) == [t[:step] for t in tokens(sound)]
  # Where nobody looks, NaN is a text of zeros.
  monkeypatch.setattr(jnp, 'isfinite', lambda z: jnp.ones(z.shape, bool))
  unseen = generator(built, poisoned, **fields).generate(PROMPTS)
  assert unseen[1]['tokens'][step:] == [0] * (20 - step)
  assert tokens(unseen)[::2] == tokens(sound)[::2]


def test_one_program_for_every_length_seed_and_temperature(one):
  """Values are arguments; new limits fall into the same buckets."""
  one.generate(PROMPTS, stop=['\0'], **SAMPLED)
  before = one._run._cache_size(), one._start._cache_size()
  for seed, limit in ((1, 17), (2, 20), (3, 31)):
    one.generate(
      PROMPTS[::-1],
      stop=['\0'],
      max_new_tokens=limit,
      temperature=0.5 + seed,
      top_k=5 * seed,
      top_p=0.9,
      seed=seed,
    )
  assert (one._run._cache_size(), one._start._cache_size()) == before


def test_every_program_is_compiled_with_the_options_of_runs(one, monkeypatch):
  """An option that no compiler knows is refused by each of the three."""
  built, params = one.built, {}
  wrong = dict(xla_no_such_option=1)
  with monkeypatch.context() as patch:
    patch.setattr(compiling, 'options', lambda: wrong)
    patch.setattr(loop.Generator, '_prepare', lambda self, params: params)
    with pytest.raises(Exception, match='xla_no_such_option'):
      loop.Generator(built, params, one.tokenizer, one.config)
    seen = []
    patch.setattr(
      jax, 'jit', lambda f, **given: seen.append(given) or (lambda *_: f)
    )
    loop.Generator(built, params, one.tokenizer, one.config)
  assert [given['compiler_options'] for given in seen] == [wrong] * 3


def test_a_call_may_feed_more_than_is_asked_for(one):
  """A row has room for all drafts of a call, 41 tokens of 32."""
  given = dict(temperature=0.0, max_new_tokens=16)
  found = one.generate(PROMPTS[1:], method='jacobi', drafts=40, **given)
  assert tokens(found) == tokens(one.generate(PROMPTS[1:], **given))


@pytest.mark.skipif(
  not narrow._converts(), reason='this XLA converts no array whole'
)
@pytest.mark.parametrize('name', MODELS)
def test_in_bfloat16_the_cache_is_not_converted(name):
  """Of a model of every kind of layer here."""
  one = generator(*made(dtype='bfloat16', **MODELS[name]))
  found = [one.generate(PROMPTS, max_new_tokens=4) for _ in range(2)]
  assert tokens(found[0]) == tokens(found[1])
  for program in (one._start, one._run):
    assert [dict(key)[narrow._FLAG] for key in program._made]


def test_buckets():
  sizes = [loop.bucket(n) for n in range(1, 3000)]
  assert all(0 <= b - n <= max(15, n // 4) for n, b in enumerate(sizes, 1))
  assert len(set(sizes)) < 40


@pytest.mark.parametrize(
  'prompts, options, words',
  [
    (['x' * 30], dict(max_new_tokens=40, cache_length=70), '31.*40.*71.*=70'),
    ([[1, 2, 300]], {}, 'token id 300 .*264'),
    ([[1, -1]], {}, 'token id -1 '),
    ([[]], {}, 'no token'),
    ([], {}, 'no prompt'),
    (['a', 'b'], dict(domains=['code']), '1 domains for 2'),
    (['a'], dict(domains=['code']), 'no domain'),
    (['a'], dict(tempratur=1.0), "Did you mean 'temperature'"),
  ],
)
def test_bad_input(one, prompts, options, words):
  with pytest.raises(errors.UserError, match=words) as e:
    one.generate(prompts, **options)
  assert '\n' not in str(e.value)


def test_learned_positions_and_vocabulary_bound_the_work():
  built, params = made(**MODELS['learned'])
  short = generator(built, params)
  with pytest.raises(errors.UserError, match='is 66 tokens.*=40'):
    short.generate(['x'], max_new_tokens=64)
  # Padding needs no position: the prompt bucket may be longer than the table.
  full = short.generate(['x' * 35], max_new_tokens=4, temperature=0.0)
  assert len(full[0]['tokens']) == 4
  with pytest.raises(errors.UserError, match='2048 entries.*=264'):
    loop.Generator(built, params, tokenizer.load('bpe2048'), schema.Decode())


def test_the_loop_copies_neither_weights_nor_cache(one):
  """In the compiled body no copy is as large as a matrix or a layer's cache."""
  sizes = decode_cases.copies(one, schema.Decode(temperature=0.0), 264)
  # The scores of the slots change their order: a number for each head of them.
  scores, matrix, cache = 4 * 96, 16 * 16, 2 * 96 * 4
  assert matrix < scores < cache
  assert scores in sizes and max({*sizes} - {scores}) < matrix
