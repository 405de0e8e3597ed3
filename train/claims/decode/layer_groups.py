"""Claims about drafts of layers side by side (EasySpec, arXiv:2502.02493).

The mixers of a group of layers read the same features, so each may run on a
device of its own; drafts get worse by it. Keys that such drafts leave are
replaced by exact ones once tokens are kept.

Legend: B rows, T tokens, C drafts.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.decode import judges
from paraxis.decode import proposal
from paraxis.decode import sampling
from paraxis.decode.drafts import drafters
from paraxis.models import build
from paraxis.sharding.planner import events
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.claims import on_tasks
from paraxis.train.claims import real_model

ROWS, PROMPT = 4, 6


def exact_keys(run, *, changes, drafts, groups, calls):
  """EQ: the draft model's cache after some calls, with groups of layers and
  without: how many of its numbers differ, bit by bit.

  What is kept is drawn at random, the same for all groups.

  Args:
    changes: {'section.field': value} of the config. drafts: a call. groups:
      layers of each, the first is 1. calls: of the model.
  """
  with jax.enable_x64(True):
    made = on_tasks.random(run, changes)
    with build.use(made.built):
      found = [_cache_after(made, drafts, group, calls) for group in groups]
  exact, *others = (jax.tree.leaves(final) for final, _ in found)
  left, *fuzzy = (jax.tree.leaves(before) for _, before in found)
  off = lambda first, rest: sum(
    int((a != b).sum()) for x in rest for a, b in zip(first, x, strict=True)
  )
  differ, meanwhile = off(exact, others), off(left, fuzzy)
  return claims.Outcome(
    '0 differ',
    f'{differ:,} differ',
    f'groups of {", ".join(map(str, groups))} layers, {calls} calls of '
    f'{drafts} drafts, float64; {meanwhile:,} differed while drafting',
    differ == 0 and meanwhile > 0,
  )


def _cache_after(made, drafts, group, calls):
  """States of the draft model's cache, (of the tokens that are read, of drafts
  too), NumPy arrays."""
  model, params = made.built.model, proposal.Params(made.params)
  vocab, slots = model.config.vocab_size, PROMPT + (drafts + 1) * (calls + 2)
  easy = drafters.EasySpec(drafters.Draft(model), drafts, group, True)
  rng = np.random.default_rng(2)
  ids = lambda *shape: jnp.asarray(rng.integers(0, vocab, shape), jnp.int32)
  form, values = sampling.check(schema.Decode(temperature=0.0), vocab)
  live, rows = jnp.ones(ROWS, bool), jnp.arange(ROWS, dtype=jnp.uint32)
  draws = judges.Draws(form, values, rows, rows)

  kept = lambda tokens, n: proposal.Seen(
    tokens, jnp.asarray(n, jnp.int32), *[None] * 4
  )
  lengths = jnp.full(ROWS, PROMPT, jnp.int32)
  own = easy.start(params, ids(ROWS, PROMPT), lengths, slots, None)
  own = easy.first(own, kept(ids(ROWS, 1), [1] * ROWS))
  propose = jax.jit(
    lambda params, own, token_B: easy.propose(params, own, token_B, live, draws)
  )
  for _ in range(calls):
    # Tokens of this call are drawn here: drafts of other groups are others.
    tokens, n = ids(ROWS, drafts + 1), rng.integers(1, drafts + 2, ROWS)
    _, held = propose(params, own, tokens[:, 0])
    own = easy.settle(held, kept(tokens, n))
  _, (_, cache, length) = propose(params, own, tokens[:, 0])

  def read(x):  # of the tokens of the text alone
    here = jnp.arange(x.shape[2]) < length[:, None]
    return jnp.where(here[:, None, :, None], x, 0)

  return jax.device_get((jax.tree.map(read, cache.states), cache.states))


def keeps(run, *, method, group, draft, prompts, loss):
  """LEARN: how many drafts fewer are kept with groups of layers.

  Args:
    method: fields of schema.Decode, but for draft_group. group: layers.
    draft: of real_model.trained; {}: none. prompts: as for
      tokens_a_call.on_real_text. loss: of kept drafts, as a share, at most.
  """
  means, tables, same = [], {}, []
  wanted = real_model.one_by_one(prompts)
  for n in (1, group):
    mean, lengths, texts = real_model.greedy(
      run, method=method | dict(draft_group=n), draft=draft, prompts=prompts
    )
    means.append(mean - 1)  # drafts that are kept
    same.append(real_model.same(wanted, texts))
    tables[f'{n} a group'] = lengths
  real_model.show(tables, run, 'groups')
  lost = 1 - means[1] / max(means[0], 1e-9)
  ours = all(sum(x) == len(wanted) for x in same)
  sound = bool(ours and min(means) > 0)
  return claims.Outcome(
    f'< {loss:.0%} lost',
    f'{lost:.1%}',
    f'{means[0]:.2f} drafts a call are kept exactly, {means[1]:.2f} in groups '
    f'of {group}; greedy, {prompts[0]} held-out prompts, {prompts[2]} tokens, '
    f'{" and ".join(map(real_model.said, same))} texts are those of one by one',
    bool(sound and lost < loss),
    sound=sound,
  )


def span(layers, group, mixer, mlp, send):
  """Time of a token through a draft model, as the event simulator says.

  Each device runs a mixer of a group, and the first all mlps; `send`: time for
  the outputs of a group to get there.
  """
  devices = {f'device{i}': 'one' for i in range(group)}
  tasks, before = [], ()
  for first in range(0, layers, group):
    each = range(first, min(first + group, layers))
    read = [('mixer', i) for i in each]
    for i, name in zip(each, read, strict=True):
      on = f'device{i - first}'
      tasks.append(events.Task(name, mixer, before, on))
    ready = tuple(read)
    if group > 1:
      tasks.append(events.Task(('send', first), send, ready, 'device0'))
      ready = (('send', first),)
    for i in each:
      tasks.append(events.Task(('mlp', i), mlp, ready, 'device0'))
      ready = (('mlp', i),)
    before = ready
  return float(max(x.end for x in events.run(tasks, devices).values()))


def drafting(run, *, layers, group, ratios, at, send, at_least):
  """SIM: time of drafting on one device over that on `group` devices.

  Args:
    layers: of the draft model. ratios: time of a mixer over that of an mlp.
    at: the ratio that is claimed. send: of a group's outputs, in mlps.
    at_least: the speedup.
  """
  found = {
    r: span(layers, 1, r, 1, send) / span(layers, group, r, 1, send)
    for r in ratios
  }
  run.say('\n'.join(f'mixer / mlp {r:4.2f}: {x:.2f}' for r, x in found.items()))
  slow = min(found.values())
  return claims.Outcome(
    f'>= {at_least:g} x at {at:g}',
    f'{found[at]:.2f} x',
    f'{layers} layers, {group} devices, sending {send:g} of an mlp; '
    f'{slow:.2f} x at a mixer of {min(ratios):g} mlps, '
    f'{max(found.values()):.2f} x at {max(ratios):g}',
    found[at] >= at_least,
  )


# ------------------------------------------------------------------ knock-outs


def no_calibration():
  """Knock-out: keys of drafts stay in the cache."""

  def wrong(self, held, seen):
    del self
    own, cache, length = held
    moved = seen.n > 0
    end = jnp.where(moved, length + seen.n - 1, own.cache.length)
    last = judges.at(seen.tokens, jnp.maximum(seen.n - 1, 0))
    tokens = jnp.where(moved[:, None], last[:, None], own.tokens)
    unread = jnp.where(moved, 1, own.n)
    return drafters.Unread(cache._replace(length=end), tokens, unread)

  return knockouts.patched(drafters.EasySpec, 'settle', wrong)


def one_by_one():
  """Knock-out: the mixers of a group run one after the other."""

  def waits(layers, group, mixer, mlp, send):
    del group
    return real(layers, 1, mixer, mlp, send)

  real = span
  return knockouts.patched(sys.modules[__name__], 'span', waits)
