"""Claims about Redco's rules: whose layout they are, and what it sends.

Programs here are laid out by parameter specs alone, as Redco's are: no mesh is
in force, no array is annotated, XLA propagates. Bytes are those that one device
receives, counted in the compiled program by sharding/meter/hlo.py.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec
import numpy as np

from paraxis.models import batch as batch_lib
from paraxis.models import decoder
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.meter import hlo
from paraxis.sharding.planner import auto_rules
from paraxis.train import loss as loss_lib
from paraxis.train.certify import trial
from paraxis.train.claims import harness as claims
from paraxis.train.run import compiling


def _shapes(model):
  return jax.eval_shape(model.init, jax.random.key(0))


def _megatron(model, size):
  """Specs of the hand-written preset 'tensor'."""
  preset, sizes = rules_lib.PRESETS['tensor'], {'tensor': size}
  return {
    p: rules_lib.spec(model.axes[p], x.shape, preset, sizes, p)
    for p, x in _shapes(model).items()
  }


def specs_are_megatrons(run, *, size, families):
  """EQ: matrices of every family are split as the hand-written rules do.

  Args:
    size: devices along tensor.
    families: {name: fields of schema.Model beyond the config's}.
  """
  same, matrices, others = 0, 0, []
  for name, fields in families.items():
    config = dataclasses.replace(run.config.model, **fields)
    model = decoder.Decoder(config)
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


def _batch(config):
  """Random tokens, one document a row."""
  rows, length = config.train.batch_size, config.data.sequence_length
  rng = np.random.default_rng(config.train.seed)
  ids = rng.integers(0, config.model.vocab_size, (rows, length + 1))
  ids, ones = ids.astype(np.int32), np.ones((rows, length), np.int32)
  positions = np.arange(length, dtype=np.int32) * ones
  return batch_lib.Batch(
    ids[:, :-1], ids[:, 1:], ones, positions, ones * 1.0, ones.sum() * 1.0
  )


def _from_specs(config, specs, mesh_text, gradients=True):
  """(compiled(params, batch), mesh): laid out by the specs, rows over data."""
  sizes = mesh_lib.parse(mesh_text)
  devices = jax.devices()[: math.prod(sizes.values())]
  made, model = mesh_lib.make(sizes, devices), decoder.Decoder(config.model)
  auto = (AxisType.Auto,) * len(mesh_lib.AXES)
  mesh = jax.sharding.Mesh(made.devices, mesh_lib.AXES, axis_types=auto)
  on = lambda spec: jax.NamedSharding(mesh, spec)
  data = _batch(config)
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

  Args:
    mesh: text as for --mesh: data and tensor.
    within: largest difference allowed, relative to each leaf's maximum.
  """
  wide = dict(dtype='float64', param_dtype='float64')
  config = dataclasses.replace(
    run.config, model=dataclasses.replace(run.config.model, **wide)
  )
  with jax.enable_x64(True):
    model, data = decoder.Decoder(config.model), _batch(config)
    params = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
    shapes = _shapes(model)
    results = []
    for text in ('data=1', mesh):
      specs = auto_rules.specs(shapes, mesh_lib.parse(text).get('tensor', 1))
      step, _ = _from_specs(config, specs, text)
      args = jax.device_put((params, data), step.input_shardings[0])
      loss, gradients = jax.device_get(step(*args))
      results.append({**gradients, 'the loss': loss})
  worst, leaf = trial.worst(results[1], results[0])
  return claims.Outcome(
    f'<= {within:.0e}',
    f'{worst:.1e}',
    f'{mesh}; float64, initial weights, random tokens, no annotation; most in '
    f'{leaf}',
    worst <= within,
  )


def reductions_per_layer(run, *, size, forward, step):
  """HLO: all-reduces of a layer, by Redco's specs and by the hand-written.

  Args:
    size: devices along tensor. forward, step: how many are expected.
  """
  found, others = {}, set()
  for rule, gradients in itertools.product(('redco', 'hand'), (False, True)):
    count = []
    for layers in (1, 2):
      model = dataclasses.replace(run.config.model, num_layers=layers)
      config = dataclasses.replace(run.config, model=model)
      made = decoder.Decoder(model)
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


def fewest_bytes(run, *, size, worst_at_least):
  """HLO: of the 16 rules that split every matrix of a layer on one side,
  Redco's and the hand-written one move the fewest bytes.

  Args:
    size: devices along tensor.
    worst_at_least: how many times the bytes the worst of them moves.
  """
  model = dataclasses.replace(run.config.model, num_layers=1)
  config = dataclasses.replace(run.config, model=model)
  made = decoder.Decoder(model)
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
    f'rank 1, >= {worst_at_least:g}x',
    f'rank {others.index(ours) + 1}, {worst / ours:.2f}x',
    f'one layer, tensor={size}, bytes per device and step: redco {ours:,}, by '
    f'hand {hand:,}, next {others[1]:,}, worst {worst:,}; q, k, v split within '
    f'heads, as the letter of the rule says, {literal:,}',
    ours == hand == others[0] and worst >= worst_at_least * ours,
  )
