"""Log-likelihoods against numbers of transformers and a plain loop.

The loop scores one sequence at a time, unpadded, on one device, with softmax in
NumPy's float64. Legend: T tokens, V vocabulary.
"""

import functools
import types
from typing import Any

import hf_families
import jax
import numpy as np
import peers
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode.evaluate import score
from paraxis.models import batch
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models.text import tokenizer

BOUND = 1e-4  # nats
SIZES = dict(
  vocab_size=264, d_model=16, num_layers=2, num_heads=4, d_ff=32,
  embedding_init_std=1.0, tied_embedding=False,
)  # fmt: skip
MODELS = dict(
  plain=SIZES,
  experts=SIZES | dict(experts=dict(count=4, pattern='E')),
  recurrent=SIZES | dict(pattern='MF', mamba=dict(head_dim=8)),
)
MESHES = ('data=1', 'data=2,fsdp=2', 'data=2,tensor=2')
TEXTS = ('a b', 'Sea, wind and sail', 'The gull is over the north. ')


def on(
  mesh, params, model, length=48, batch_size=8, vocabulary='bytes', **decode
):
  """Scorer of a schema.Model with NumPy parameters; decode: its fields."""
  sizes = schema.view(
    {'model': model, 'mesh': dict(sequence=False), 'decode': decode}
  )
  count = dict(zip(MESHES, (1, 4, 4), strict=True))[mesh]
  built = build.build(sizes, mesh, devices=jax.devices()[:count])
  put = lambda x, like: jax.device_put(np.asarray(x, like.dtype), like.sharding)
  laid = {p: put(params[p], like) for p, like in built.params.items()}
  if isinstance(vocabulary, str):
    vocabulary = tokenizer.load(vocabulary)
  parts = built, laid, vocabulary, ()
  return score.Scorer(parts, sizes.decode, length, batch_size, print)


@functools.cache
def drawn(name):
  """(schema.Model, {path: NumPy array}) of a model drawn at random."""
  model = schema.view({'model': MODELS[name]}).model
  params = jax.jit(decoder.Decoder(model).init)(jax.random.key(0))
  return model, jax.device_get(params)


@functools.cache
def forward(name):
  """Compiled: (params, batch.Batch of a row) -> logits (1, T, V)."""
  made = decoder.Decoder(drawn(name)[0])
  return jax.jit(lambda p, data: made.logits(p, made.features(p, data)[0]))


def plain_log_softmax(name, ids):
  """(T, V) float64 log-probabilities after each of the ids."""
  row = lambda x: np.array(x, np.int32)[None]
  t, ones = len(ids), row([1] * len(ids))
  data = batch.Batch(
    row(ids), ones, ones, row(range(t)), ones * np.float32(1), np.float32(t)
  )
  z_TV = np.asarray(forward(name)(drawn(name)[1], data)[0], np.float64)
  z_TV -= z_TV.max(-1, keepdims=True)
  return z_TV - np.log(np.exp(z_TV).sum(-1, keepdims=True))


def looped(name, context, continuation, shift=0):
  """(log p of the continuation, whether it is greedy), token by token."""
  ids = [*context, *continuation]
  table = plain_log_softmax(name, ids[:-1])
  total, greedy = 0.0, True
  for i in range(len(context), len(ids)):
    row = table[i - 1]
    total += row[(ids[i] + shift) % len(row)]
    greedy &= int(row.argmax()) == ids[i]
  return total, greedy


def pairs_of(texts, first=258):
  """(context, continuation) of texts as bytes, cut at their middle."""
  halves = [(list(t.encode()), len(t) // 2) for t in texts]
  return [([first, *ids[:half]], ids[half:]) for ids, half in halves]


@pytest.fixture(scope='module')
def llama():
  """Scores of one token each, and what transformers gave for them: a table of
  (log-probabilities V, the token)."""
  record = hf_families.read_golden('llama')
  _, params = hf_families.params_of(record)
  logits = np.reshape(record['logits'], record['shape'])
  sizes = dict(
    vocab_size=48, d_model=16, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=24,
    num_layers=2, attention_block=8, tied_embedding=False,
  )  # fmt: skip
  ids = peers.rows(48, (2, 24))
  pairs, wanted = [], []
  for row, seen in enumerate(logits):
    for at, z in zip((12, 23), seen, strict=True):
      tokens = [int(t) for t in ids.tokens[row]]
      pairs.append((tokens[: at + 1], [int(ids.targets[row, at])]))
      wanted.append(z - np.log(np.exp(z).sum()))
  names: Any = types.SimpleNamespace(name='none', vocab_size=48)
  found = on('data=1', params, sizes, vocabulary=names).scores(pairs)
  return [s.nats for s in found], wanted, [p[1][0] for p in pairs]


def test_log_likelihoods_are_those_of_transformers(llama):
  found, wanted, labels = llama
  right = [row[label] for row, label in zip(wanted, labels, strict=True)]
  np.testing.assert_allclose(found, right, rtol=0, atol=BOUND)


def test_a_shifted_label_is_seen(llama):
  found, wanted, labels = llama
  wrong = [row[(t + 1) % 48] for row, t in zip(wanted, labels, strict=True)]
  assert np.abs(np.subtract(found, wrong)).min() > 100 * BOUND


@pytest.mark.parametrize('name', MODELS)
def test_a_batch_equals_a_plain_loop(name):
  _, params = drawn(name)
  pairs = pairs_of(TEXTS)
  best = int(plain_log_softmax(name, pairs[0][0])[-1].argmax())
  pairs.append((pairs[0][0], [best]))
  found = on('data=1', params, MODELS[name]).scores(pairs)
  for one, pair in zip(found, pairs, strict=True):
    total, greedy = looped(name, *pair)
    assert abs(one.nats - total) < BOUND and one.greedy == greedy
    assert one.tokens == len(pair[1]) and one.cut == 0
    assert abs(one.nats - looped(name, *pair, shift=1)[0]) > 100 * BOUND
  assert [s.greedy for s in found] == [False] * len(TEXTS) + [True]


@pytest.mark.parametrize('name', MODELS)
def test_batches_and_meshes_change_nothing(name):
  _, params = drawn(name)
  pairs = pairs_of(TEXTS)
  each = [
    on(mesh, params, MODELS[name], batch_size=size).scores(pairs)
    for mesh, size in (('data=1', 1), *((mesh, 8) for mesh in MESHES))
  ]
  first, *others = [[s.nats / s.tokens for s in found] for found in each]
  for other in others:  # float32: 8 units in the last place
    np.testing.assert_allclose(other, first, rtol=1e-6, atol=0)
  assert len({round(x, 3) for x in first}) == len(TEXTS)


@pytest.mark.parametrize('mesh', MESHES)
def test_weights_of_4_bits_are_scored_as_such(mesh):
  """Groups of 32 inputs an output: sevenths of the largest weight of each."""
  sizes = SIZES | dict(d_model=64, d_ff=64)
  model = schema.view({'model': sizes}).model
  params = jax.device_get(
    jax.jit(decoder.Decoder(model).init)(jax.random.key(1))
  )
  by_hand = dict(params)
  for path, x in params.items():
    if path.startswith('layers/') and x.ndim > 2:
      parts = x.reshape(len(x), 2, 32, -1)
      step = np.abs(parts).max(2, keepdims=True) / 7
      step = np.asarray(jax.numpy.asarray(step, 'bfloat16'), x.dtype)
      by_hand[path] = (np.clip(np.rint(parts / step), -7, 7) * step).reshape(
        x.shape
      )
  pairs = pairs_of(TEXTS)
  kept = dict(weights='int4', weight_group=32)
  found = on(mesh, params, sizes, **kept).scores(pairs)
  wanted = on('data=1', by_hand, sizes).scores(pairs)
  loaded = on('data=1', params, sizes).scores(pairs)
  for one, other, before in zip(found, wanted, loaded, strict=True):
    assert abs(one.nats - other.nats) < BOUND
    assert abs(one.nats - before.nats) > 100 * BOUND


def test_documents_are_cut_into_windows():
  """Every token once; each window continues the one token before it, the last
  one what else a row has room for: of 46 tokens the last 14 are behind 3."""
  _, params = drawn('plain')
  made = on('data=1', params, SIZES, length=16)
  text = TEXTS[1] + TEXTS[2]
  ids = list(text.encode())
  ((nats, tokens), (short, few)) = made.rolling([text, 'ab'], [258])
  total = 0.0
  for a in range(0, len(ids), 16):
    before = {0: [258], 16: ids[15:16], 32: ids[29:32]}[a]
    total += looped('plain', before, ids[a : a + 16])[0]
  assert abs(nats - total) < BOUND and tokens == len(ids) == 46
  assert abs(short - looped('plain', [258], b'ab')[0]) < BOUND and few == 2
  whole = looped('plain', [258], ids)[0]
  assert abs(nats - whole) > BOUND  # windows lose context


def test_long_contexts_are_cut_from_the_left():
  _, params = drawn('plain')
  made = on('data=1', params, SIZES, length=16)
  ids = list(TEXTS[2].encode())
  (found,) = made.scores([(ids[:20], ids[20:])])
  assert found.cut == len(ids) - 17 == 11
  wanted, _ = looped('plain', ids[11:20], ids[20:])
  assert abs(found.nats - wanted) < BOUND


def test_blanks_of_a_context_belong_to_the_continuation():
  _, params = drawn('plain')
  made = on('data=1', params, SIZES)
  asked = [('Sea ', 'wind'), ('Sea', ' wind'), ('', 'wind')]
  first, second, third = made.continuations(asked, [258])
  assert first == second and first.tokens == 5 and third.tokens == 4
  assert abs(third.nats - looped('plain', [258], b'wind')[0]) < BOUND
  assert made.continuations([('', 'wind')], []) == [third]


def test_texts_are_one_by_one_whatever_the_run_decodes_by(capsys):
  _, params = drawn('plain')
  wanted = on('data=1', params, SIZES).texts([[258, 65]], 8, ())
  for decode in (
    dict(method='wavefront'), dict(method='medusa', draft='none.npz'),
    dict(method='speculative', draft_layers=1, judge='typical'),
    dict(requests=1),
  ):  # fmt: skip
    made = on('data=1', params, SIZES, **decode)
    assert made.texts([[258, 65]], 8, ()) == wanted, decode
  assert 'wait' not in capsys.readouterr().out  # for a row


def test_what_cannot_be_scored_is_one_line():
  _, params = drawn('plain')
  made = on('data=1', params, SIZES, length=16)
  with support.refused('q.jsonl:3', 'continuation is empty'):
    made.continuations([('a', '')], [258], ['q.jsonl:3'])
  with support.refused('example 0', 'context is empty'):
    made.scores([([], [1])])
  with support.refused('20 tokens', 'a row 16'):
    made.scores([([1], [2] * 20)])
  with support.refused('max_new_tokens=16', '16 tokens'):
    made.texts([[1]], 16, ())
  with support.refused('259', '48'):
    on('data=1', params | {}, SIZES | dict(vocab_size=48), vocabulary='bytes')
  params = params | {'norm/scale': params['norm/scale'] * np.nan}
  with pytest.raises(errors.IntegrityError, match='example 0: .* nan'):
    on('data=1', params, SIZES).scores([([1], [2])])
