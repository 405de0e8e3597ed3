"""A wavefront of tokens: one by one where it must be, and what it counts."""

import math

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import load
from paraxis.decode import loop
from paraxis.decode import methods
from paraxis.sharding import mesh as mesh_lib
from paraxis.train.claims import experiment
from paraxis.train.claims import on_tasks

pytestmark = pytest.mark.usefixtures('float64')

PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [3]]
CORE = dict(prelude=1, core=1, iterations=4)


@pytest.fixture(scope='module')
def made():
  with jax.enable_x64(True):
    return generator()


def config_of(recurrence=(), **fields):
  model = dict(
    vocab_size=32, d_model=16, num_heads=2, num_layers=3, d_ff=24,
    dtype='float64', param_dtype='float64', recurrence=CORE | dict(recurrence),
  )  # fmt: skip
  model |= fields
  return schema.view(dict(model=model, mesh=dict(sequence=False)))


def generator(recurrence=(), **fields):
  config = config_of(recurrence, **fields)
  return on_tasks.generator(config, experiment.random_parameters)


def random_parameters(model):
  with jax.enable_x64(True):
    return experiment.random_parameters(model)


def texts(made, new=12, temperature=0.0, trace=False, **how):
  method = dict(method='wavefront', wavefront=how) if how else {}
  return made.generate(
    PROMPTS, max_new_tokens=new, temperature=temperature, seed=2, trace=trace,
    **method,
  )  # fmt: skip


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_one_token_of_all_passes_is_one_by_one(made, temperature):
  one = texts(made, temperature=temperature)
  found = texts(made, temperature=temperature, width=1, inner=4)
  for a, b in zip(one, found, strict=True):
    assert a['tokens'] == b['tokens'] and b['calls'] == 12
    np.testing.assert_allclose(a['logprobs'], b['logprobs'], atol=1e-12)
  # It can fail: two passes a call leave the cache of two passes.
  found = texts(made, temperature=temperature, width=1, inner=2)
  gap = [
    abs(np.subtract(a['logprobs'], b['logprobs'])[:1]).max()
    for a, b in zip(one, found, strict=True)
  ]
  assert max(gap) > 1e-9


# ------------------------------------------------------ against a plain loop


def layer_of(params, i):
  return {p: x[i] for p, x in params.items() if p.startswith('layers/')}


def rms(x, scale):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def layer(w, x, old):
  """(x, (keys, values) of these tokens) behind those of a text."""
  w = {p.removeprefix('layers/'): v for p, v in w.items()}
  normed = rms(x, w['attention_norm/scale'])
  q, k, v = (
    np.einsum('td,dnh->tnh', normed, w[f'attention/{name}'])
    for name in ('query', 'key', 'value')
  )
  keys, values = (
    np.concatenate(pair) for pair in zip(old, (k, v), strict=True)
  )
  y = np.zeros_like(x)
  for t in range(len(x)):
    last = len(old[0]) + t + 1
    for n in range(q.shape[1]):
      z = keys[:last, n] @ q[t, n] / q.shape[-1] ** 0.5
      p = np.exp(z - z.max())
      y[t] += p / p.sum() @ values[:last, n] @ w['attention/output'][n]
  x = x + y
  normed = rms(x, w['mlp_norm/scale'])
  return x + np.maximum(normed @ w['mlp/up'], 0) @ w['mlp/down'], (k, v)


class Plain:
  """One row, greedy, in NumPy: lists of keys and values of every pass."""

  def __init__(self, params, passes, how):
    self.params, self.how = params, how
    self.rounds = passes // how['inner']
    shape = params['layers/attention/key'].shape[2:]
    empty = np.zeros((0, *shape))
    self.kept = [(empty, empty)] * (how['inner'] + 2)
    self.waited = 0  # places that were ready before one before them was

  def noise(self, token, position):
    own = jax.random.fold_in(jax.random.key(0), position)
    own = jax.random.fold_in(own, token)
    width = self.params['embedding'].shape[1]
    return np.array(jax.random.normal(own, (width,), 'f4'), 'f8')

  def call(self, ids, states):
    """(logits, states, [(keys, values)] of each pass)."""
    p, new = self.params, []
    e, made = layer(layer_of(p, 0), p['embedding'][ids], self.kept[0])
    new.append(made)
    for i in range(self.how['inner']):
      x = e @ p['core/from_input'] + states @ p['core/from_state']
      x, made = layer(layer_of(p, 1), x, self.kept[1 + i])
      new.append(made)
      states = rms(x, p['core/norm/scale'])
    x, made = layer(layer_of(p, 2), states, self.kept[-1])
    new.append(made)
    x = rms(x, p['norm/scale'])
    return x @ p['embedding'].T, states, new

  def keep(self, new, count):
    self.kept = [
      tuple(np.concatenate([a, b[:count]]) for a, b in zip(*pair, strict=True))
      for pair in zip(self.kept, new, strict=True)
    ]

  def text(self, prompt, new):
    """(new tokens, their log probabilities, tokens that every call made)."""
    how, text, logs, counts = self.how, list(prompt), [], []
    if len(prompt) > 1:
      ids = prompt[:-1]
      states = np.array([self.noise(t, i) for i, t in enumerate(ids)])
      for _ in range(self.rounds):
        _, states, made = self.call(ids, states)
      self.keep(made, len(ids))
    front = [dict(token=prompt[-1], visits=0, age=0, state=0)]
    while len(text) < len(prompt) + new:
      at = len(text) - 1
      front = front[: len(prompt) + new - 1 - at]
      states = []
      for i, place in enumerate(front):
        n = self.noise(place['token'], at + i)
        share = how['noise'] / (1 + how['inner'] * place['visits'])
        share = share if place['visits'] else 1
        states.append(share * n + (1 - share) * place['state'])
      ids = [place['token'] for place in front]
      z, after, made = self.call(ids, np.array(states))
      draws = z.argmax(-1).tolist()
      count, going = 0, True
      for i, place in enumerate(front):
        gap = np.linalg.norm(after[i] - place['state'])
        settled = gap / np.linalg.norm(after[i]) < how['threshold']
        settled = settled and place['visits'] > 0
        ready = settled or place['age'] + 1 >= self.rounds
        ready = ready and (i == 0 or ids[i] == draws[i - 1])
        self.waited += ready and not going
        going = going and ready
        count += going
        place.update(
          state=after[i], visits=place['visits'] + 1, age=place['age'] + 1
        )
      self.keep(made, count)
      text += draws[:count]
      p = np.exp(z - z.max(-1, keepdims=True))
      p = np.log(p / p.sum(-1, keepdims=True))
      logs += [p[i, draws[i]] for i in range(count)]
      counts.append(count)
      for i in range(1, len(front)):
        if front[i]['token'] != draws[i - 1]:
          front[i].update(token=draws[i - 1], age=0)
      more = max(
        min(len(front) + how['headway'], how['width'] + count), count + 1
      )
      front += [
        dict(token=draws[-1], visits=0, age=0, state=0)
        for _ in range(more - len(front))
      ]
      front = front[count:]
    return text[len(prompt) :], logs, counts


@pytest.mark.parametrize(
  'how',
  [
    dict(width=4, inner=1, headway=1, threshold=0.3, noise=0.0),
    dict(width=5, inner=2, headway=2, threshold=0.2, noise=0.5),
    dict(width=3, inner=4, headway=3, threshold=0.0, noise=0.0),
    dict(width=8, inner=1, headway=4, threshold=0.5, noise=0.0),
  ],
)
def test_it_is_a_loop_over_calls(how):
  """Text, calls and what each of them made, of rows decoded together."""
  made = generator(mlp='relu', position='none')
  params = {
    p: np.array(x) for p, x in random_parameters(made.built.model).items()
  }
  waited = 0
  for prompt, row in zip(PROMPTS, texts(made, **how), strict=True):
    plain = Plain(params, 4, how)
    text, logs, counts = plain.text(prompt, 12)
    assert row['tokens'] == text
    np.testing.assert_allclose(row['logprobs'], logs, rtol=0, atol=1e-5)
    wanted = np.bincount(counts, minlength=how['width'] + 1)
    assert row['lengths'] == wanted.tolist()
    waited += plain.waited
  assert waited or how['width'] < 6


# ------------------------------------------------------------------- by rules


@pytest.mark.parametrize(
  'how',
  [
    dict(width=4, inner=1),
    dict(width=16, inner=2, headway=3, noise=0.5),
    dict(width=3, inner=2, headway=2, threshold=0.0),
    dict(width=4, inner=1, threshold=1e9),
  ],
)
def test_rows_do_not_know_of_each_other(made, how):
  """Nor of the trace; calls add up, and the record is the text."""
  found = texts(made, trace=True, **how)
  for prompt, row in zip(PROMPTS, found, strict=True):
    (alone,) = made.generate(
      [prompt], max_new_tokens=12, temperature=0.0, seed=2, method='wavefront',
      wavefront=how,
    )  # fmt: skip
    assert alone['tokens'] == row['tokens'], how
    assert alone['calls'] == row['calls']
    made_of = sum(n * count for n, count in enumerate(row['lengths']))
    assert made_of == len(row['tokens']) == 12
    trace = row['trace']
    assert trace.tokens[trace.final].tolist() == row['tokens']
    assert len(trace.tokens) == row['calls']


def test_a_token_takes_at_most_all_passes(made):
  """Where no state ever settles each token has its four passes."""
  for row in texts(made, width=1, inner=1, threshold=0.0):
    assert row['calls'] == 4 * 12
  for row in texts(made, width=1, inner=2, threshold=0.0):
    assert row['calls'] == 2 * 12
  # All settle at once, in the second call of each.
  for row in texts(made, width=1, inner=1, threshold=1e9):
    assert row['calls'] == 2 * 12


def test_a_wide_front_takes_fewer_calls(made):
  narrow = texts(made, width=1, inner=1, threshold=0.0)
  wide = texts(made, width=12, inner=1, threshold=0.0)
  for a, b in zip(narrow, wide, strict=True):
    assert b['calls'] < a['calls'] / 2


@pytest.mark.parametrize('mesh', ['data=2,tensor=2', 'context=4'])
def test_on_a_mesh_it_is_one_device(made, mesh):
  """One by one, and of a wavefront: text, calls and log probabilities."""
  config = config_of()
  devices = jax.devices()[: math.prod(mesh_lib.parse(mesh).values())]
  built = load.built_for(config, mesh, devices)
  params = module_cases.placed(built, random_parameters(built.model))
  sharded = loop.Generator(
    built, params, on_tasks.Numbers(32), made.config, lambda line: None
  )
  for how in ({}, dict(width=5, inner=2, headway=2, noise=0.5)):
    wanted = texts(made, temperature=1.0, **how)
    found = texts(sharded, temperature=1.0, **how)
    for a, b in zip(wanted, found, strict=True):
      assert (a['tokens'], a['lengths']) == (b['tokens'], b['lengths'])
      np.testing.assert_allclose(a['logprobs'], b['logprobs'], atol=1e-10)


def test_requests_share_rows(made):
  """A front that takes the row of another has nothing of it."""
  how = dict(width=4, inner=1, headway=2, noise=0.5)
  prompts = [*PROMPTS, [1] * 20, [4, 5]]
  given = dict(
    max_new_tokens=12, temperature=1.0, seed=2, method='wavefront',
    wavefront=how,
  )  # fmt: skip
  want = made.generate(prompts, **given)
  found = made.generate(prompts, requests=3, budget=64, **given)
  for a, b in zip(found, want, strict=True):
    assert (a['tokens'], a['lengths']) == (b['tokens'], b['lengths'])


@pytest.mark.parametrize('noise', [0.0, 0.5])
def test_a_row_that_waits_for_others_keeps_its_front(made, noise):
  """Who reads along has the same text: rows that are ahead stand still."""
  how = dict(width=6, inner=1, headway=2, noise=noise)
  given = dict(max_new_tokens=40, temperature=0.0, method='wavefront')
  whole = made.generate(PROMPTS, wavefront=how, **given)
  heard = made.generate(
    PROMPTS, wavefront=how, on_text=lambda row, piece: None, **given
  )
  for a, b in zip(whole, heard, strict=True):
    assert a['tokens'] == b['tokens'] and a['lengths'] == b['lengths']


def test_numbers_that_are_not_finite_end_the_decoding(made):
  """Of the prompt, too: no token of it is left out."""
  params = dict(random_parameters(made.built.model))
  table = np.array(params['embedding'])
  table[PROMPTS[0][1]] = np.nan
  broken = type(made)(
    made.built, params | {'embedding': jnp.array(table)},
    on_tasks.Numbers(32), made.config, lambda line: None,
  )  # fmt: skip
  with pytest.raises(errors.IntegrityError, match='row 0 at step 0'):
    texts(broken, width=4, inner=2)


def test_text_ends_at_an_end(made):
  """What is drawn behind an end is no text."""
  rows = texts(made, new=12, width=6, inner=1)
  end = rows[0]['tokens'][5]
  ended = type(made)(
    made.built, random_parameters(made.built.model), Ends(32, end), made.config,
    lambda line: None,
  )  # fmt: skip
  for a, b in zip(rows, texts(ended, new=12, width=6, inner=1), strict=True):
    wanted = a['tokens']
    cut = wanted[: wanted.index(end)] if end in wanted else wanted
    assert [t for t in b['tokens'] if t != end] == cut
    assert (b['finish'] == 'end') == (end in wanted)


class Ends(on_tasks.Numbers):
  """Numbers whose id `end_id` ends a text."""

  def __init__(self, vocab_size, end_id):
    super().__init__(vocab_size)
    self.end_id = end_id


@pytest.mark.parametrize(
  'core, how, words',
  [
    ({}, dict(inner=3), ('inner=3', 'iterations=4')),
    (dict(core=0, prelude=0), dict(inner=1), ('core=0', 'autoregressive')),
  ],
)
def test_what_it_refuses(core, how, words):
  with support.refused(*words):
    texts(generator(core), **how)


@pytest.mark.parametrize('method', methods.OF_LAYERS)
def test_layers_of_a_core_do_not_draft(made, method):
  with support.refused(f'method={method}', 'core=1', 'wavefront'):
    made.generate(PROMPTS, method=method, draft_layers=1)


@pytest.mark.parametrize('method', ['jacobi', 'prompt_lookup'])
def test_drafts_of_its_own_are_lossless(made, method):
  found = made.generate(
    PROMPTS, max_new_tokens=12, temperature=0.0, method=method
  )
  for a, b in zip(texts(made), found, strict=True):
    assert a['tokens'] == b['tokens']


def test_states_are_those_of_the_text():
  """A recurrence keeps nothing of places that were read and are not text."""
  config = config_of(dict(iterations=1), pattern='G')

  def parameters(model):
    params = dict(experiment.random_parameters(model))
    zero = jnp.zeros_like(params['core/from_state'])
    return params | {'core/from_state': zero}  # a pass is that of one by one

  made = on_tasks.generator(config, parameters)
  found = texts(made, width=4, inner=1, threshold=0.0, headway=3)
  for a, b in zip(texts(made), found, strict=True):
    assert a['tokens'] == b['tokens']
    np.testing.assert_allclose(a['logprobs'], b['logprobs'], atol=1e-12)
