"""What a run keeps, and reports, of what layers count (models/aux.py).

A leaf of a model of kind 'statistic' is read and not learned: it holds the
counts of the previous step, assignments to each expert, those dropped and the
router's entropy. One of kind 'balance', a router's bias, moves towards experts
that got fewer assignments than the mean (arXiv:2408.15664). Both are
State.counts, no parameters: what maps over parameters never sees them. The
tally of Newton's method (models/mixers/recurrent.py) is only reported: every
shard solves its own part, so, unlike the counts, it depends on the layout.

Legend: L layers that have the parameter, E experts.
"""

import jax.numpy as jnp

from paraxis.models import aux as aux_lib
from paraxis.models import depth
from paraxis.models.ffn import router
from paraxis.sharding import annotate

KINDS = ('statistic', 'balance')
LOAD, BIAS = KINDS


def paths(model, kinds=KINDS):
  """Leaves of a model that are read and not learned."""
  return [p for p, kind in model.kinds.items() if kind in kinds]


def whole_step(model):
  """Those that need the counts of the current step, not the previous."""
  experts = model.config.experts
  asked = experts.balance and experts.balance_scope == 'step'
  return paths(model, (LOAD,)) if asked else []


def without(model, tree):
  """{path: leaf} of learned parameters."""
  kept = model.frozen.union(paths(model))
  return {p: x for p, x in tree.items() if p not in kept}


def update(model, aux, counts):
  """{path: new value} of State.counts."""
  out = {
    p: aux.counts[p].astype(counts[p].dtype) for p in paths(model, (LOAD,))
  }
  for path in paths(model, (BIAS,)):
    if path in model.frozen:
      continue
    load = aux.counts[path.removesuffix('bias') + 'load']
    count, old = load[:, : -router.EXTRA], counts[path]
    under = jnp.sign(count.mean(-1, keepdims=True) - count)
    rate = model.config.experts.bias_rate
    out[path] = old + rate * under.astype(old.dtype)
  return out


def metrics(model, aux):
  """{name: number or array} of a step; {} without experts and solvers.

  balance_loss, z_loss, and NAME_loss of a user's mixer: terms of the loss,
  summed over layers, coefficients included. tally/NAME: its tallies.
  experts/imbalance: assignments of the busiest expert / mean, the mean over
  layers. experts/dropped: share of all assignments. experts/dropped_count: how
  many. experts/entropy: of the router, nats per token. experts/load: {path:
  (L, E), share of the layer's assignments that each expert got}.
  newton/: see `_solver`.
  """
  own = lambda table: (i for i in table.items() if i[0] not in aux_lib.OURS)
  found = {f'{name}_loss': x for name, x in own(aux.terms)}
  found |= {f'tally/{name}': x for name, x in own(aux.tallies)}
  if 'newton' in aux.tallies:
    found |= _solver(aux.tallies['newton'])
  return found | (_experts(model, aux.counts) if aux.counts else {})


def _solver(tally):
  """Of the solves of a step, every layer and shard: their mean iterations and
  residual, and the share that had to be done again in sequence."""
  solves, iterations, residual, again = tally
  of = lambda x: x / jnp.maximum(solves, 1)
  return {
    'newton/iterations': of(iterations),
    'newton/residual': of(residual),
    'newton/fallbacks': of(again),
  }


def _experts(model, loads):
  ratio = lambda a, b: a / jnp.maximum(b, 1)
  parts, shares, extra = [], {}, router.EXTRA
  for path, counts in loads.items():
    experts, (dropped, entropy) = counts[:, :-extra], counts[:, -extra:].T
    total = experts.sum(-1)
    tokens = ratio(total, model.config.experts.top_k)
    busiest = ratio(experts.max(-1), total / experts.shape[-1])
    parts.append((busiest, dropped, total, ratio(entropy, tokens)))
    share = experts / jnp.maximum(total, 1)[:, None]
    # Whole on every device: with layers on stages a process may hold a part.
    shares[path] = annotate.put(share, (None, None))
  join = lambda arrays: jnp.concatenate(arrays)
  busiest, dropped, total, entropy = map(join, zip(*parts, strict=True))
  return {
    # Rows that hold no layer count nothing.
    'experts/imbalance': ratio(busiest.sum(), (total > 0).sum()),
    'experts/dropped': ratio(dropped.sum(), total.sum()),
    'experts/dropped_count': dropped.sum(),
    'experts/entropy': ratio(entropy.sum(), (total > 0).sum()),
    'experts/load': shares,
  }


def values(model, numbers, loads):
  """The numbers of `metrics`, on the host, as a run writes them.

  Args:
    model: models.decoder.Decoder.
    numbers: {name: NumPy value} of a step.
    loads: also 'experts/load/<path>', a list of shares for each layer.
  """
  ours = ('experts/', 'newton/', 'tally/')
  found = {k: v for k, v in numbers.items() if k.startswith(ours)}
  shares = found.pop('experts/load', {})
  terms = {f'train/{k}': v for k, v in numbers.items() if k.endswith('_loss')}
  out = {name: float(v) for name, v in (terms | found).items()}
  if loads:
    for path, v in shares.items():
      in_order = depth.to_order(v, *model.held[path])
      out[f'experts/load/{path}'] = in_order.tolist()
  return out


def warn(model, step, values, say):
  """Says how much found no slot, if it is above model.experts.drop_limit, and
  how many sequences Newton's method did not solve."""
  again = values.get('newton/fallbacks')
  if again:
    settings = model.config.recurrent
    say(
      f"step {step}: Newton's method did not solve {again:.1%} of the "
      f'recurrences within model.recurrent.iterations={settings.iterations} to '
      f'model.recurrent.tolerance={settings.tolerance:g}; they were run in '
      'sequence: smaller recurrent weights, or more iterations, avoid that.'
    )
  limit, share = model.config.experts.drop_limit, values.get('experts/dropped')
  if share is not None and share > limit:
    say(
      f'step {step}: {values["experts/dropped_count"]:.0f} assignments to '
      f'experts, {share:.1%} of all, found no slot (model.experts.drop_limit='
      f'{limit:.1%}): raise model.experts.capacity_factor, or set it to 0 to '
      'drop none.'
    )
