"""Ensembles of experts against Bayes' rule, token by token, in a plain loop.

The loop takes logits of one sequence at a time, unpadded, on one device; the
rest is NumPy's float64. Legend: E experts, T tokens, V vocabulary.
"""

import functools
import json
import math

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import shares
from paraxis.decode.evaluate import ensemble
from paraxis.decode.evaluate import score
from paraxis.models import batch
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models.text import tokenizer
from paraxis.train import cli

SIZES = dict(
  vocab_size=264, d_model=16, num_layers=1, num_heads=2, d_ff=32,
  embedding_init_std=1.0, tied_embedding=False,
)  # fmt: skip
MESHES = {'data=1': 1, 'data=2,tensor=2': 4}
PRIOR = (0.7, 0.1, 0.2)
PAIRS = [
  ([258, *b'Sea and'], [*b' wind']),
  ([258, *b'The gull is over the'], [*b' north']),
  ([258], [*b'a']),
]
WITHIN = 1e-4  # nats


@functools.cache
def drawn(seed):
  model = schema.view({'model': SIZES}).model
  init = jax.jit(decoder.Decoder(model).init)
  return jax.device_get(init(jax.random.key(seed)))


@functools.cache
def forward():
  made = decoder.Decoder(schema.view({'model': SIZES}).model)
  return jax.jit(lambda p, data: made.logits(p, made.features(p, data)[0]))


def table(seed, ids):
  """(T, V) float64 log-probabilities after each of the ids."""
  row = lambda x: np.array(x, np.int32)[None]
  ones = row([1] * len(ids))
  data = batch.Batch(row(ids), None, ones, row(range(len(ids))), None, 1)
  z_TV = np.asarray(forward()(drawn(seed), data)[0], np.float64)
  z_TV -= z_TV.max(-1, keepdims=True)
  return z_TV - np.log(np.exp(z_TV).sum(-1, keepdims=True))


def after(prior, ids):
  """(p of the next token, V; p of each expert) after some ids, by Bayes."""
  belief = np.array(prior, np.float64)
  tables = [table(seed, ids) for seed in range(len(prior))]
  for t, token in enumerate(ids[1:]):
    belief *= [np.exp(rows[t, token]) for rows in tables]
    belief /= belief.sum()
  last = np.exp([rows[-1] for rows in tables])
  return belief @ last, belief


def looped(prior, context, continuation):
  """(log p of the continuation, whether each token is the likeliest)."""
  ids, nats, greedy = list(context), 0.0, True
  for token in continuation:
    p_V, _ = after(prior, ids)
    nats, greedy = nats + math.log(p_V[token]), greedy & (p_V.argmax() == token)
    ids.append(token)
  return nats, greedy


def parts_of(mesh, seeds):
  config = schema.view({'model': SIZES, 'mesh': dict(sequence=False)})
  built = build.build(config, mesh, devices=jax.devices()[: MESHES[mesh]])
  put = lambda x, like: jax.device_put(np.asarray(x, like.dtype), like.sharding)
  laid = [
    {p: put(drawn(seed)[p], like) for p, like in built.params.items()}
    for seed in seeds
  ]
  return [(built, params, tokenizer.load('bytes'), ()) for params in laid]


def made(mesh='data=1', prior=PRIOR, seeds=None):
  seeds = range(len(prior)) if seeds is None else seeds
  parts = parts_of(mesh, seeds)
  return ensemble.Scorer(parts, prior, schema.Decode(), 48, 4, print)


@pytest.mark.parametrize('mesh', MESHES)
def test_scores_are_those_of_bayes(mesh):
  found = made(mesh).scores(PAIRS)
  for got, pair in zip(found, PAIRS, strict=True):
    nats, greedy = looped(PRIOR, *pair)
    assert abs(got.nats - nats) < WITHIN and got.greedy == greedy
  # A prior that no text moves is another model.
  still = sum(
    math.log(sum(w * math.exp(table(e, ids)[-1, token])
                 for e, w in enumerate(PRIOR)))
    for ids, token in _each(*PAIRS[1])
  )  # fmt: skip
  assert abs(found[1].nats - still) > 100 * WITHIN


def _each(context, continuation):
  ids = list(context)
  for token in continuation:
    yield list(ids), token
    ids.append(token)


@pytest.mark.parametrize('mesh', MESHES)
def test_texts_are_the_likeliest_tokens(mesh):
  prompts = [[258, *b'Sea'], [258, *b'Gull and sail'], [258]]
  texts, cut = made(mesh).texts(prompts, 8, ())
  assert cut == 0
  for text, ids in zip(texts, prompts, strict=True):
    new = []
    for _ in range(8):  # of the last, 6 are those of a prior that stays
      new.append(int(after(PRIOR, [*ids, *new])[0].argmax()))
    kept = new[: new.index(256)] if 256 in new else new
    wanted = tokenizer.load('bytes').decode_bytes(kept)
    assert text == wanted.decode('utf-8', 'replace')
  stop = texts[1][1:3]
  assert made(mesh).texts(prompts, 8, (stop,))[0][1] == texts[1][:1]


def test_numbers_behind_the_end_of_a_text_do_not_matter():
  """A token that one row alone reads has no embedding."""
  prompts, reader = [[258, *b'Sea'], [258]], made()
  rows = []
  for ids in prompts:
    new = []
    for _ in range(8):
      new.append(int(after(PRIOR, [*ids, *new])[0].argmax()))
    rows.append(new)
  read = {*prompts[0], *prompts[1], *rows[1]}
  at = next(i for i, t in enumerate(rows[0]) if t not in read)
  reader._ends = (rows[0][at],)
  texts = reader.texts(prompts, 8, ())
  for params in reader._laid:
    params['embedding'] = params['embedding'].at[rows[0][at]].set(np.nan)
  assert reader.texts(prompts, 8, ()) == texts
  reader._ends = ()
  with pytest.raises(errors.IntegrityError, match=f'row 0 at step {at + 1} '):
    reader.texts(prompts, 8, ())


def test_greedy_tokens_are_seen():
  """The mixture's likeliest token need not be any single expert's."""
  ids = [258, *b'Sail over']
  token = int(after(PRIOR, ids)[0].argmax())
  other = (token + 1) % 256
  found = made().scores([(ids, [token]), (ids, [other])])
  assert [s.greedy for s in found] == [True, False]


def test_one_expert_again_and_again_is_that_one():
  plain = score.Scorer(
    parts_of('data=1', [1])[0], schema.Decode(), 48, 4, print
  )
  wanted = plain.scores(PAIRS)
  same = made(prior=(0.2, 0.3, 0.5), seeds=[1, 1, 1])
  for got, one in zip(same.scores(PAIRS), wanted, strict=True):
    assert abs(got.nats - one.nats) < 1e-5 and got.greedy == one.greedy
  # Experts of weight 0 are not there, to the last bit.
  assert made(prior=(0, 1, 0)).scores(PAIRS) == wanted
  prompts = [[258, *b'Sea'], [258]]
  assert same.texts(prompts, 4, ()) == plain.texts(prompts, 4, ())
  # Nor does it matter whether one of weight 0 is named.
  few, more = made(prior=(0.5, 0.5)), made(prior=(0.5, 0.5, 0))
  assert few.scores(PAIRS) == more.scores(PAIRS)


def test_a_text_is_a_sum_over_experts():
  """By both ways: the sum over tokens is that of whole texts."""
  rng = np.random.default_rng(0)
  nats_EBT = -rng.gamma(2.0, 3.0, (3, 2, 400)).astype(np.float32)
  prior_E = np.log(np.array(PRIOR, np.float32))
  belief = ensemble.believed(prior_E, nats_EBT)
  np.testing.assert_allclose(np.exp(belief).sum(0), 1, atol=1e-5)
  np.testing.assert_allclose(belief[:, :, 0].T, [prior_E] * 2, atol=1e-6)
  by_token = jax.nn.logsumexp(belief + nats_EBT, 0).sum(-1)
  whole = ensemble.total(prior_E, nats_EBT.sum(-1))
  np.testing.assert_allclose(by_token, whole, rtol=1e-5)


# ------------------------------------------------------------- the command


@pytest.fixture
def runs(tmp_path):
  """Folders of two experts and of a wider model."""
  found = []
  for seed, width in ((0, 32), (1, 32), (2, 48)):
    config = schema.view(
      {
        'model': SIZES | dict(d_ff=width),
        'data': dict(tokenizer='bytes', sequence_length=32),
      }
    )
    built = build.build(config, 'data=1', devices=jax.devices()[:1])
    with build.use(built):
      params = jax.jit(built.model.init)(jax.random.key(seed))
    found.append(support.save_run(tmp_path / f'{seed}', config, built, params))
  return found


def test_the_command(runs, tmp_path, monkeypatch, capsys, settings):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'a.txt').write_text('Sea and wind.')
  one, two, wide = map(str, runs)
  call = lambda *flags: cli.main(
    ['evaluate', '--tasks=a.txt', '--json=a.json', *flags]
  )
  assert call(f'--ensemble={one}:0.75,{two}/checkpoints/1:0.25') == 0
  found = json.loads((tmp_path / 'a.json').read_text())
  assert found['step'] == [1, 1] and found['model'].startswith(one)
  prior = 0.75, 0.25
  nats = looped(prior, [258], [*b'Sea and wind.'])[0]
  assert found['results']['a.txt']['examples'][0]['nats'] == pytest.approx(
    -nats, abs=WITHIN
  )
  capsys.readouterr()
  for flags, words in (
    ((f'--ensemble={one},{wide}',), 'run 2 of 2 is of another model'),
    ((f'--ensemble={one},{two}', '--step=1'), 'leave out'),
    ((f'--ensemble={one}:x:-1',), 'a weight of at least 0'),
  ):
    assert call(*flags) == errors.EXIT_USER
    assert words in capsys.readouterr().err


@pytest.fixture
def settings(monkeypatch, tmp_path):
  from paraxis.sharding.meter import compiling

  monkeypatch.setattr(compiling, 'use_cache', lambda: None)
  monkeypatch.setenv('PARAXIS_CACHE', str(tmp_path / 'user_cache'))


def test_shares():
  found = shares.parse(['a:3', 'b', 'c:d:0'], 'what')
  assert found == [('a', 0.75), ('b', 0.25), ('c:d', 0.0)]
  for texts, words in (
    (['a:nan'], "'a:nan' is not NAME"),
    ([''], 'NAME:WEIGHT'),
    (['a', 'a:2'], 'named twice'),
    (['a:0'], 'total weight 0'),
    ([], 'total weight 0'),
    (['a:1e308', 'b:1e308'], 'total weight inf'),
  ):
    with support.refused(words):
      shares.parse(texts, 'what')
