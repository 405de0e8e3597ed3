"""Claims about what experts compute, wherever they are, and how many there are.

Numbers are those of one device that holds all experts
(train/certify/verify.py); sizes are those of the built model. What experts send
is in messages.py, how evenly they are loaded in loads.py, what they learn in
training.py.

Legend: N tokens, K choices, E experts, D width, F width of an expert, L layers.
"""

import collections
import contextlib
import dataclasses
import fractions
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models.ffn import router
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.experts import dispatch as expert
from paraxis.train import expert_counts
from paraxis.train import step as step_lib
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts


@contextlib.contextmanager
def _watched():
  """({sorted ids of experts that devices gather}, their tokens that are sent).

  Of all exchanges with slots within; the second is a set of counts.
  """
  gathered, sent, hots = set(), set(), []
  dispatch, exchange = expert.dispatch, expert._padded

  def dispatched(*given):
    hots.append(given[-1])
    return dispatch(*given)

  def exchanged(run, weights, x_ND, ids_NK, mix_NK, keep_NK, plan):
    again = keep_NK[..., None] & (ids_NK[..., None] == hots[-1])
    jax.debug.callback(note, hots[-1], again.sum())
    return exchange(run, weights, x_ND, ids_NK, mix_NK, keep_NK, plan)

  def note(hot, count):
    gathered.add(_ids(hot))
    sent.add(int(count))

  with (
    knockouts.patched(expert, 'dispatch', dispatched),
    knockouts.patched(expert, '_padded', exchanged),
  ):
    yield gathered, sent
    jax.effects_barrier()


def _ids(row):
  return tuple(np.sort(row).tolist())


class _Hot(NamedTuple):
  """What `_hot_sets` finds; chosen, gathered: sets of ids of experts.

  sent: counts of tokens that go to other devices for experts that are hot.
  """

  experts: int
  gaps: list
  programs: int
  chosen: set
  gathered: set
  sent: set


def _hot_sets(config, mesh, hot, sets):
  """`_Hot` of losses and gradients, as loads are drawn."""
  with jax.enable_x64(True):
    config, devices = experiment.shrunk(config, mesh)
    config = experiment.fields(config, {'model.experts.hot': hot})
    plain = experiment.fields(config, {'model.experts.hot': 0})
    wanted = trial.reference(plain, True, devices[0])
    side = trial.Runner(config, devices)
    step = step_lib.make(side.job.built, side.job.optimizer, 0.0)
    programs, gaps, chosen = [], [], set()

    def grads(params, batch):
      programs.append('traced')
      return step.grads(params, batch)

    compiled = jax.jit(grads, compiler_options=trial.quick_options())
    with _watched() as (gathered, sent):
      for seed in range(sets):
        loads, ids = _random_loads(side.job.model, wanted.params, hot, seed)
        chosen |= ids
        state = side.start(wanted.params | loads)
        with side.job.context():
          batch = side.put(wanted.batches[0])
          loss, found, _ = jax.device_get(compiled(state.variables, batch))
        gaps.append(trial.worst(found, wanted.gradients, 1e-6)[0])
        gaps.append(float(abs(loss - wanted.loss) / abs(wanted.loss)))
  count = config.model.experts.count
  return _Hot(count, gaps, len(programs), chosen, gathered, sent)


def any_hot_set(run, *, mesh, hot, sets, within):
  """EQ: loss and gradients whichever experts are hot, with one program.

  Those that devices gather are those with the most assignments before, and
  none of their tokens is sent.

  Args:
    hot: experts that every device gathers.
    sets: how many times they are drawn at random, for every layer.
  """
  found = _hot_sets(run.config, mesh, hot, sets)
  count, gaps, programs, chosen, gathered, sent = found
  right, stay = gathered == chosen, sent == {0}
  return experiment.equal(
    gaps,
    within,
    f'{mesh}, {count} experts of which {hot} hot; programs: {programs} (must '
    f'be 1); {sets} draws, {len(chosen)} different sets, those gathered '
    f'{"are" if right else "are NOT"} the busiest, their tokens '
    f'{"stay" if stay else "are SENT"}; against one device without hot '
    'experts, float64, shrunk',
    programs == 1 and len(chosen) > 1 and right and stay,
  )


def _random_loads(model, params, hot, seed):
  """({path: loads of all different sizes}, {hot experts of each layer})."""
  rng, loads, chosen = np.random.default_rng(seed), {}, set()
  for path in expert_counts.paths(model, (expert_counts.LOAD,)):
    rows, columns = params[path].shape
    x = rng.permuted(np.tile(np.arange(1.0, columns + 1), (rows, 1)), axis=1)
    busiest = np.argsort(-x[:, : -router.EXTRA], 1)[:, :hot]
    chosen |= set(map(_ids, busiest))
    loads[path] = x.astype(params[path].dtype)
  return loads, chosen


def _drawn(rows, E=8, K=2, D=4):
  """(w_EDD, x_ND, ids_NK, mix_NK) of tokens whose odds of expert i are 1/i."""
  rng = np.random.default_rng(0)
  odds = np.log(1 / np.arange(1, E + 1)) + rng.gumbel(size=(rows, E))
  ids = np.argsort(-odds, 1)[:, :K].astype(np.int32)
  x, mix = rng.normal(size=(rows, D)), rng.random((rows, K))
  return rng.normal(size=(E, D, D)), x, ids, mix


def _dispatched(mesh, plan, arrays):
  """(y, assignments dropped, dw, dx, dmix) of `_drawn` arrays, in NumPy.

  An expert is one matrix; gradients are of sum(y sin(x)).
  """
  placed, axes = experiment.mesh_of(mesh), plan.region

  def local(w, x, ids, mix):
    def sent(w, x, mix):
      run = lambda rows, weights, multiply: multiply(rows, weights[0], 1)
      valid = jnp.ones(len(x), bool)
      return expert.dispatch(run, [w], x, ids, mix, valid, plan)

    y, back, dropped = jax.vjp(sent, w, x, mix, has_aux=True)
    return y, jax.lax.psum(dropped, axes), *back(jnp.sin(x))

  split = jax.P(axes)
  run = jax.shard_map(
    local,
    in_specs=(split,) * 4,
    out_specs=(split, jax.P(), split, split, split),
    check_vma=False,
  )
  with jax.set_mesh(placed):
    rows = jax.NamedSharding(placed, split)
    return jax.device_get(jax.jit(run)(*jax.device_put(arrays, rows)))


def axis_by_axis_is_bitwise(run, *, meshes, tokens):
  """EQ: exchanges axis by axis give the bits of exchanges at once.

  Output and all gradients of one dispatch, float32.

  Args:
    meshes: list of them; experts are over all their axes.
    tokens: of each device.
  """
  verdicts, same = [], True
  for mesh in meshes:
    sizes = mesh_lib.parse(mesh)
    drawn = _drawn(tokens * math.prod(sizes.values()))
    arrays = [a if a.dtype == np.int32 else a.astype('f') for a in drawn]
    flat, stepwise = (
      _dispatched(
        mesh, expert.DispatchPlan(8, tuple(sizes), hierarchical=how), arrays
      )
      for how in (False, True)
    )
    equal = all(map(np.array_equal, flat, stepwise))
    same &= equal and all(np.abs(a).max() > 0 for a in flat[2:])
    verdicts.append(f'{mesh} {"equal" if equal else "NOT equal"}')
  return claims.Outcome(
    'the same bits',
    'the same bits' if same else 'other bits',
    f'output, gradients of tokens, weights and experts: {"; ".join(verdicts)}',
    same,
  )


def wrong_order():
  """Knock-out: axis by axis, blocks are taken to lie nearest axis first."""
  real = expert._swap

  def swap(x, plan):
    axes = plan.region[:: -1 if plan.hierarchical else 1]
    return real(x, dataclasses.replace(plan, region=axes))

  return knockouts.patched(expert, '_swap', swap)


def no_capacity():
  """Knock-out: experts take all that is sent to them."""
  real = expert.dispatch

  def free(run, weights, x, ids, mix, valid, plan):
    unbounded = dataclasses.replace(plan, factor=0.0)
    return real(run, weights, x, ids, mix, valid, unbounded)

  return knockouts.patched(expert, 'dispatch', free)


def mlp_beside_experts(run, *, tokens, within):
  """EQ: with c = 1/2 for both, the residual layers are shared experts, halved.

    y = c_0 sum_k mix_k f_k(x) + c_1 g(x),  c = softmax(x C),  C = 0

  Logits and all gradients but C's, against layers y = sum_k mix_k f_k + g whose
  f and g end in half the matrix; float64.

  Args:
    tokens: of each of two rows.
  """
  shared = {'model.experts.residual': False, 'model.experts.shared': 1}
  with jax.enable_x64(True):
    config, _ = experiment.shrunk(run.config, 'data=1')
    batch = experiment.documents(2, tokens, config.model.vocab_size)
    ours, other = (
      decoder.Decoder(experiment.fields(config, changes).model)
      for changes in ({}, shared)
    )
    params = experiment.random_parameters(other)
    zeros = {
      p: jnp.zeros(x.shape, x.dtype)
      for p, x in jax.eval_shape(ours.init, jax.random.key(0)).items()
      if p not in params
    }

    def logits(model, params):
      return model.logits(params, model.features(params, batch)[0])

    def both(run):
      def call(params):
        y, back = jax.vjp(run, params)
        return {'logits': y, **back(jnp.sin(y))[0]}

      return jax.jit(call, compiler_options=trial.quick_options())(params)

    ends = lambda path: 'moe/' in path and path.endswith('/down')
    half = lambda path: 0.5 if ends(path) else 1.0
    halved = lambda params: {p: x * half(p) for p, x in params.items()}
    found = both(lambda params: logits(ours, params | zeros))
    wanted = both(lambda params: logits(other, halved(params)))
  gaps = {p: experiment.gap(found[p], x) for p, x in wanted.items() if x.any()}
  return experiment.equal(
    gaps,
    within,
    f'{config.model.experts.pattern}, top-{config.model.experts.top_k}, '
    f'{len(gaps) - 1} gradients, logits {gaps["logits"]:.0e}; shrunk, random '
    'weights, float64',
    any('beside' in path for path in gaps),
  )


def _served(ids, slots):
  """(N, K) bool: assignments of one device that find a slot, in order."""
  taken, out = collections.Counter(), np.zeros(ids.shape, bool)
  for n, k in np.ndindex(*ids.shape):
    out[n, k] = taken[ids[n, k]] < slots
    taken[ids[n, k]] += 1
  return out


def drops_are_counted(run, *, mesh, region, factors, tokens):
  """EQ: what finds no slot is counted, and nothing else is missing.

  Against a loop over tokens, with experts that are one matrix each and tokens
  that prefer some of them; float64. With the smallest factor some are dropped.

    slots of an expert for a device = ceil(tokens K / E x factor), exactly

  Args:
    mesh, region: of the exchange; the mesh has no other axes.
    factors: capacity factors. tokens: of each device.
  """
  n, axes = math.prod(mesh_lib.parse(mesh).values()), tuple(region.split('+'))
  w, x, ids, mix = drawn = _drawn(n * tokens)
  gaps, losses, right, some = [], [], True, False
  share = fractions.Fraction(tokens * ids.shape[1], len(w))
  for factor in factors:
    plan = expert.DispatchPlan(len(w), axes, factor=factor)
    slots = math.ceil(share * fractions.Fraction(str(factor)))
    served = np.concatenate([
      _served(part, slots) for part in ids.reshape(n, tokens, -1)
    ])  # fmt: skip
    wanted = np.einsum('NK,ND,NKDF->NF', mix * served, x, w[ids])
    with jax.enable_x64(True):
      y, dropped, *_ = _dispatched(mesh, plan, drawn)
    gaps.append(experiment.gap(y, wanted))
    right &= int(dropped) == (~served).sum()
    some |= bool(dropped)  # of the smallest factor, if of any
    losses.append(f'{factor:g}: {int(dropped)} ({(~served).mean():.1%})')
  return experiment.equal(
    gaps,
    1e-12,
    f'counts {"equal" if right else "DIFFER"}; {mesh}, {len(w)} experts, '
    f'top-{ids.shape[1]}, {tokens} tokens a device '
    'whose odds of expert i are 1 / i; assignments dropped, by capacity '
    f'factor: {"; ".join(losses)} of {ids.size}'
    f'{"" if some else ", NOTHING is"}',
    right and some,
  )


def parameter_counts(run, *, cases, within):
  """SIM: parameters of published shapes, by formula, as built, as published.

    MoE layer: E x 2 D F + D E, residual: + 2 D F + 2 D;  pyramid: P has 2 E

  Args:
    cases: {name: {'published': number, 'model': fields of schema.Model}, and
      'experts': fields of schema.Experts}.
    within: relative difference allowed from what was published.
  """
  off, counts, exact = [], [], True
  plain = dataclasses.replace(run.config, mesh=schema.Mesh())
  for name, case in cases.items():
    config = experiment.fields(
      plain,
      experiment.under('model', case['model']),
      experiment.under('model.experts', case.get('experts', {})),
    )
    built = build.build(config, abstract=True)
    counted = set(expert_counts.paths(built.model))
    sizes = {
      p: math.prod(x.shape) for p, x in built.params.items() if p not in counted
    }
    ours = sum(sizes.values())
    exact &= ours == _formula(config.model)
    off.append(abs(ours / case['published'] - 1))
    counts.append(f'{name} {ours:,}')
  return claims.Outcome(
    f'the formula; +-{within:.0%} of the paper',
    f'{"equal" if exact else "NOT equal"}; {max(off):.1%} off',
    'built without arrays, counters left out: ' + '; '.join(counts),
    exact and max(off) <= within,
  )


def _formula(model):
  """Parameters of a GPT with experts (gelu, learned positions, tied)."""
  e, D, F = model.experts, model.d_model, model.d_ff
  heads = model.num_heads * model.head_width
  every = 4 * D * heads + 2 * D  # projections, two RMSNorms
  mlp, total = 2 * D * F, 0
  for i in range(model.num_layers):
    kind = e.pattern[i % len(e.pattern)] if e.count else 'D'
    count = {'E': e.count, 'P': 2 * e.count, 'D': 0}[kind]
    own = count * (mlp + D) + e.residual * (mlp + 2 * D) if count else mlp
    total += every + own
  return total + (model.vocab_size + model.max_positions) * D + D
