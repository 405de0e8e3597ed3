"""Claims about Redco's rules: whose layout they are, and what it sends.

Programs of the rules by name are laid out by parameter specs alone, as Redco's
are: no mesh is in force, no array is annotated, XLA propagates. Those by the
program drive the step, as mesh.rules=auto does. Bytes are those that one device
receives, counted in the compiled program by sharding/meter/hlo.py. The argument
`size` of a claim is the number of devices along tensor.
"""

import functools
import itertools
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models.mixers import attention
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.meter import compiling
from paraxis.sharding.meter import hlo
from paraxis.sharding.planner import auto_rules
from paraxis.train import loss as loss_lib
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts


def _shapes(model):
  return jax.eval_shape(model.init, jax.random.key(0))


def _megatron(model, size):
  """Specs of the hand-written preset 'tensor'."""
  sizes = {'tensor': size}
  hand = rules_lib.of(
    schema.Mesh(rules='tensor'),
    sizes,
    attention.num_kv_heads(model.config),
    'tensor',  # has the experts, whole ones
  )
  return {
    p: rules_lib.spec(model.axes[p], x.shape, hand, sizes, p)
    for p, x in _shapes(model).items()
  }


def columns():
  """Knock-out: every matrix is split by its outputs, no pair of two."""
  decide = auto_rules.decide

  def outputs(shapes, size):
    found = decide(shapes, size)
    last = lambda path: len(getattr(shapes[path], 'shape', shapes[path])) - 1
    for path, decision in found.items():
      if decision.kind == auto_rules.ROW:
        found[path] = auto_rules.Decision(auto_rules.COLUMN, last(path))
    return found

  return knockouts.patched(auto_rules, 'decide', outputs)


def whole():
  """Knock-out: nothing is split."""
  specs = auto_rules.specs
  none = lambda *given: dict.fromkeys(specs(*given), PartitionSpec())
  return knockouts.patched(auto_rules, 'specs', none)


def specs_are_megatrons(run, *, size, families):
  """EQ: matrices of every family are split as the hand-written rules do.

  Args:
    families: {name: fields of schema.Model beyond the config's}.
  """
  same, matrices, others = 0, 0, []
  for name, fields in families.items():
    own = experiment.under('model', fields)
    model = decoder.Decoder(experiment.fields(run.config, own).model)
    ours, hand = auto_rules.specs(_shapes(model), size), _megatron(model, size)
    for path in ours:
      if model.kinds[path] != 'vector':
        matrices += 1
        same += ours[path] == hand[path]
        if ours[path] != hand[path]:
          others.append(f'{name} {path}')
  learned = [o for o in others if o.endswith(' positions')]
  return claims.Outcome(
    f'all but {len(learned)} of {matrices}',
    f'all but {matrices - same} of {matrices}',
    f'{", ".join(families)}; tensor={size}; learned positions are split by '
    f'rows, as every embedding ({", ".join(others)}); vectors stay whole',
    others == learned,
  )


def alphabetical():
  """Knock-out: mesh.rules=auto by names, others by turns in the alphabet."""
  by_name = lambda shapes, size, found: auto_rules.decide(shapes, size)
  return knockouts.patched(auto_rules, 'follow', by_name)


def _by_name(shapes, size):
  """{path: PartitionSpec} of the rules by name; nothing where they refuse."""
  try:
    return auto_rules.specs(shapes, size)
  except errors.UserError:
    return {}


def as_by_hand(run, *, size, models):
  """EQ: mesh.rules=auto splits every matrix as the hand-written rules do.

  Args:
    models: {name: fields of schema.Model beyond the config's}.
  """
  same, matrices, others, names = 0, 0, [], []
  for name, fields in models.items():
    config = experiment.fields(run.config, experiment.under('model', fields))
    model = decoder.Decoder(config.model)
    shapes, _, found = build.program_axes_of(config.model)
    ours, hand = auto_rules.specs(shapes, size, found), _megatron(model, size)
    kept = [p for p in shapes if model.kinds[p] in ('matrix', 'embedding')]
    differ = [p for p in kept if ours[p] != hand[p]]
    others += [f'{name} {p}' for p in differ]
    matrices, same = matrices + len(kept), same + len(kept) - len(differ)
    old = _by_name(shapes, size)
    count = sum(old[p] != hand[p] for p in kept) if old else 'refused'
    names += [f'{name} {count}'] if count else []
  learned = [o for o in others if o.endswith(' positions')]
  return claims.Outcome(
    f'all but {len(learned)} of {matrices}',
    f'all but {matrices - same} of {matrices}',
    f'{", ".join(models)}; tensor={size}, the hand-written with the experts '
    f'there; others: {", ".join(others) or "none"}. By names and the alphabet '
    f'others are {", ".join(names) or "none"}',
    others == learned,
  )


def _from_specs(config, specs, mesh_text, gradients=True):
  """(compiled(params, batch), mesh): laid out by the specs, rows over data."""
  made = experiment.mesh_of(mesh_text)
  model = decoder.Decoder(config.model)
  auto = (AxisType.Auto,) * len(mesh_lib.AXES)
  mesh = jax.sharding.Mesh(made.devices, mesh_lib.AXES, axis_types=auto)
  on = lambda spec: jax.NamedSharding(mesh, spec)
  data = trial.batches(config, False)[0]
  rows = jax.tree.map(
    lambda x: on(PartitionSpec('data') if np.ndim(x) else PartitionSpec()), data
  )
  layouts = {p: on(spec) for p, spec in specs.items()}
  loss = functools.partial(loss_lib.next_token, model)
  run = jax.value_and_grad(loss) if gradients else loss
  whole = on(PartitionSpec())
  outs = (whole, layouts) if gradients else whole
  step = jax.jit(run, in_shardings=(layouts, rows), out_shardings=outs)
  options: Any = compiling.options()
  return step.lower(_shapes(model), data).compile(options), mesh


@functools.lru_cache(maxsize=32)
def _sent(config, specs, mesh_text, gradients):
  """[hlo.Collective] of that program; specs: items of the dict."""
  program, mesh = _from_specs(config, dict(specs), mesh_text, gradients)
  return hlo.collectives(program.as_text(), mesh)


def specs_equal_one_device(run, *, mesh, within):
  """EQ: loss and gradients, laid out by the specs alone, equal one device.

  The compiler gives these numbers in any layout: on every device each matrix
  and its gradient must be its part, 1 / tensor of them.
  """
  wide = {'model.dtype': 'float64', 'model.param_dtype': 'float64'}
  config = experiment.fields(run.config, wide)
  with jax.enable_x64(True):
    model = decoder.Decoder(config.model)
    data = trial.batches(config, False)[0]
    params = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
    shapes = _shapes(model)
    results = []
    for text in ('data=1', mesh):
      size = mesh_lib.parse(text).get('tensor', 1)
      step, _ = _from_specs(config, auto_rules.specs(shapes, size), text)
      args = jax.device_put((params, data), step.input_shardings[0])
      loss, gradients = step(*args)
      results.append(jax.device_get({**gradients, 'the loss': loss}))
  worst, leaf = trial.worst(results[1], results[0])
  matrices = [p for p, kind in model.kinds.items() if kind != 'vector']
  shares = [
    set(experiment.bytes_by_device(tree[p])) == {gradients[p].nbytes // size}
    for p in matrices
    for tree in (args[0], gradients)
  ]
  return experiment.equal(
    worst,
    within,
    f'{mesh}; float64, initial weights, random tokens, no annotation; most in '
    f'{leaf}; of {len(matrices)} matrices and their gradients a device holds '
    f'{"its part" if all(shares) else "MORE"}',
    all(shares),
  )


def reductions_per_layer(run, *, size, forward, step):
  """HLO: all-reduces of a layer, forward and in a step, by Redco's specs and by
  the hand-written."""
  found, others = {}, set()
  for rule, gradients in itertools.product(('redco', 'hand'), (False, True)):
    count = []
    for layers in (1, 2):
      config = experiment.fields(run.config, {'model.num_layers': layers})
      made = decoder.Decoder(config.model)
      specs = _megatron(made, size)
      if rule == 'redco':
        specs = auto_rules.specs(_shapes(made), size)
      sent = _sent(config, tuple(specs.items()), f'tensor={size}', gradients)
      others |= {c.kind for c in sent} - {'all-reduce'}
      count.append((sum(c.count for c in sent), sum(c.total for c in sent)))
    found[rule, gradients] = np.subtract(count[1], count[0]).tolist()
  rows = run.config.train.batch_size * run.config.data.sequence_length
  one = 2 * (size - 1) * rows * run.config.model.d_model * 4 // size
  say = lambda rule: f'{found[rule, False][0]}, {found[rule, True][0]}'
  expected = f'{forward}, {step}'
  return claims.Outcome(
    expected,
    say('redco'),
    f'in a layer, tensor={size}; by hand {say("hand")}. The messages of a step '
    f'sum {found["redco", True][1] / one:g} arrays: XLA adds the terms of dx '
    'from q, k, v, and from up and gate, after it summed each; other '
    f'collectives: {", ".join(sorted(others)) or "none"}',
    say('redco') == say('hand') == expected and not others,
  )


def _sides(shapes, decisions, flipped):
  """Specs with the pairs named in `flipped` split on their other side."""
  out = {}
  for path, decision in decisions.items():
    dim, ndim = decision.dim, len(shapes[path].shape)
    if any(path.endswith(f'/{name}') for name in flipped):
      dim = 1 if decision.kind == auto_rules.COLUMN else ndim - 1
    parts = ['tensor' if d == dim else None for d in range(ndim)]
    out[path] = PartitionSpec(*parts)
  return out


_PAIRS = (('query', 'key', 'value'), ('output',), ('up', 'gate'), ('down',))


def fewest_bytes(run, *, size):
  """HLO: of the 16 rules that split every matrix of a layer on one side,
  Redco's and the hand-written one move the fewest bytes, and not all as many.
  """
  config = experiment.fields(run.config, {'model.num_layers': 1})
  made = decoder.Decoder(config.model)
  shapes = _shapes(made)
  decisions = auto_rules.decide(shapes, size)

  def moved(specs):
    sent = _sent(config, tuple(specs.items()), f'tensor={size}', True)
    return sum(c.total for c in sent)

  found = {}
  for turned in itertools.product((False, True), repeat=len(_PAIRS)):
    names = [n for on, p in zip(turned, _PAIRS, strict=True) if on for n in p]
    found[turned] = moved(_sides(shapes, decisions, names))
  ours, hand = found[(False,) * len(_PAIRS)], moved(_megatron(made, size))
  letter = dict(auto_rules.specs(shapes, size))
  for name in _PAIRS[0]:
    last = PartitionSpec(None, None, None, 'tensor')
    letter[f'layers/attention/{name}'] = last
  worst, literal = max(found.values()), moved(letter)
  others = sorted(found.values())
  return claims.Outcome(
    'rank 1, worst > 1x',
    f'rank {others.index(ours) + 1}, {worst / ours:.2f}x',
    f'one layer, tensor={size}, bytes per device and step: redco {ours:,}, by '
    f'hand {hand:,}, next {others[1]:,}, worst {worst:,}; q, k, v split within '
    f'heads, as the letter of the rule says, {literal:,}',
    ours == hand == others[0] < worst,
  )
