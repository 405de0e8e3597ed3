"""B and W taken apart by tapes against one joint backward pass.

Two gated layers in a scan and one after it; products gather x (up and gate, a
group) and scatter y (down), and a scale belongs to no product.

Legend: B rows, T tokens, D model, F mlp, L layers.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.sharding import annotate
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.meter import flops
from paraxis.sharding.meter import hlo
from paraxis.sharding.tensor import project
from paraxis.sharding.tensor import tape

B, T, D, F, L = 2, 8, 6, 4, 3
RESIDUAL = ('batch', 'residual_length', 'hidden')
WIDE = ('batch', 'length', 'mlp')
UP, DOWN = ('embed', 'mlp'), ('mlp', 'embed')
NAMES = dict(
  up=('layers', *UP), gate=('layers', *UP), down=('layers', *DOWN),
  scale=('layers', 'norm'),
)  # fmt: skip
WORLDS = ('plain', 'tensor=2')


@pytest.fixture(autouse=True)
def _double():
  # Residuals over tensor, as in every manual region.
  rules = rules_lib.of(schema.Mesh(), dict(tensor=2), 2)
  with jax.enable_x64(True), annotate.use(rules):
    yield


def arrays(dtype=np.float64):
  """(stacks, x, cotangent)."""
  rng = np.random.default_rng(0)
  shapes = dict(up=(L, D, F), gate=(L, D, F), down=(L, F, D), scale=(L, D))
  stacks = {p: rng.normal(size=s) for p, s in shapes.items()}
  x, g = rng.normal(size=(2, B, T, D)).astype(dtype)
  return stacks, jnp.asarray(x), jnp.asarray(g)


def layer(values, x, slot=0):
  own = lambda path: project.Owned(values[path], (path, slot))
  h = x * values['scale'].astype(x.dtype)
  rows = [('BTD,DF->BTF', own(n), UP, WIDE) for n in ('up', 'gate')]
  up, gate = project.project(h, RESIDUAL, rows, ring=True)
  return x + project.einsum(
    'BTF,FD->BTD', jnp.tanh(gate) * up, WIDE, own('down'), DOWN, RESIDUAL
  )


def chain(stacks, x, taped):
  """All layers -> (y, arrays of the tapes of the scan, of the last layer)."""

  def body(x, row):
    values, zeros = row
    return taped.run(0, lambda x: layer(values, x), x, zeros)

  some = {p: v[: L - 1] for p, v in stacks.items()}
  last = {p: v[L - 1] for p, v in stacks.items()}
  x, scanned = lax.scan(body, x, (some, taped.zeros.get(0)))
  run = lambda x: layer(last, x)
  x, rest = taped.run(1, run, x, taped.zeros.get(1))
  return x, (scanned, rest)


def plain(stacks, x):
  """y of all layers in one scan, without a tape."""
  return lax.scan(lambda x, values: (layer(values, x), None), x, stacks)[0]


def joint(stacks, x, g):
  """-> (gx, gradients) of one backward pass."""
  gradients, gx = jax.vjp(plain, stacks, x)[1](g)
  return gx, gradients


def apart(stacks, x, g):
  """B -> (gx, gradients of what is on no tape, tape.Tapes)."""
  first = tape.Taped()
  shapes = jax.eval_shape(lambda: chain(stacks, x, first)[1])
  like = lambda s: jnp.zeros(s.shape, s.dtype)
  zeros = {
    part: [jax.tree.map(like, zero) for _, zero in records]
    for part, records in enumerate(shapes)
  }
  records = tuple(tuple(first.static[part]) for part in zeros)
  on_tape = {path for rows in records for r in rows for path, _ in r.owners}
  rest = {p: v for p, v in stacks.items() if p not in on_tape}
  run = lambda rest, x, zeros: chain(stacks | rest, x, tape.Taped(zeros))
  _, back, xs = jax.vjp(run, rest, x, zeros, has_aux=True)
  gradients, gx, gs = back(g)
  return gx, gradients, tape.Tapes(xs, gs, records)


def split(stacks, x, g):
  """B and then W, as `joint`."""
  gx, gradients, tapes = apart(stacks, x, g)
  late = tapes.weight_gradients()
  assert not late.keys() & gradients.keys()
  return gx, gradients | late


def layouts():
  """PartitionSpecs of `arrays`."""
  rows = annotate.spec(RESIDUAL)
  return {p: annotate.spec(names) for p, names in NAMES.items()}, rows, rows


def in_region(function, together=False):
  """function(stacks, x, g) in a manual region; a shard's results are stacked
  on a new first axis, or put together."""
  stacks, rows, _ = layouts()

  def run(*args):
    found = function(*args)
    return found if together else jax.tree.map(lambda x: x[None], found)

  return jax.shard_map(
    run,
    in_specs=layouts(),
    out_specs=(rows, stacks) if together else jax.P('tensor'),
    check_vma=False,
  )


def whole(function):
  """Gradients of what every shard holds summed over them once."""

  def run(*args):
    gx, gradients = function(*args)
    scale = lax.psum(gradients['scale'], 'tensor')
    return gx, gradients | {'scale': scale}

  return run


def evaluate(world, function):
  """{leaf: NumPy array} of gx and every gradient."""
  if world == 'plain':
    # A function of its own: jit would keep what it compiled before a patch.
    gx, gradients = jax.device_get(jax.jit(lambda *a: function(*a))(*arrays()))
  else:
    with support.laid_out(world, 2):
      region = in_region(whole(function), together=True)
      gx, gradients = jax.device_get(jax.jit(region)(*placed()))
  return {'x': gx} | gradients


def placed():
  """arrays() on the mesh in force."""
  return jax.device_put(arrays(), layouts())


@functools.cache
def wanted():
  """The joint gradients of a plain run."""
  return evaluate('plain', joint)


def wrong(found):
  """Names of the leaves that are not those of the joint pass."""
  assert found.keys() == wanted().keys()
  given = [found[name] for name in wanted()]
  return set(kernel_cases.wrong(wanted(), given, wanted().values(), 1e-12))


@pytest.mark.parametrize('world', WORLDS)
def test_apart_equals_joint(world):
  assert wanted().keys() == {'x', 'up', 'gate', 'down', 'scale'}
  assert not wrong(evaluate(world, joint))
  assert not wrong(evaluate(world, split))


def units(stacks, x, taped):
  """As `chain`, with two layers to a unit of the scan, of which it has one."""

  def body(x, row):
    values, zeros = row

    def unit(x):
      for slot in range(2):
        x = layer({p: v[slot] for p, v in values.items()}, x, slot)
      return x

    return taped.run(0, unit, x, zeros)

  some = {p: v[None, :2] for p, v in stacks.items()}
  last = {p: v[2] for p, v in stacks.items()}
  x, scanned = lax.scan(body, x, (some, taped.zeros.get(0)))
  x, rest = taped.run(1, lambda x: layer(last, x), x, taped.zeros.get(1))
  return x, (scanned, rest)


def test_layers_of_a_unit_keep_their_order(monkeypatch):
  monkeypatch.setitem(globals(), 'chain', units)
  assert not wrong(evaluate('plain', split))


@pytest.mark.parametrize('world', WORLDS)
@pytest.mark.parametrize('leaf', ['up', 'gate', 'down'])
def test_a_dropped_factor_shows_in_its_leaf(monkeypatch, world, leaf):
  right = tape.weight_gradients

  def dropped(record, x, gs):
    gs = [
      g * (owner != (leaf, 0))
      for owner, g in zip(record.owners, gs, strict=True)
    ]
    return right(record, x, gs)

  monkeypatch.setattr(tape, 'weight_gradients', dropped)
  assert wrong(evaluate(world, split)) == {leaf}


def test_operations_of_b_and_w_are_those_of_one_pass():
  stacks, x, g = arrays()
  count = lambda function, *a: flops.count(function, *a).total
  together, b = count(joint, stacks, x, g), count(apart, stacks, x, g)
  tapes = jax.eval_shape(apart, stacks, x, g)[2]
  w = count(tape.Tapes.weight_gradients, tapes)
  assert abs((b + w) / together - 1) < 0.01
  # One of three products is W's: B makes no gradient of a weight.
  assert b == 2 * w
  # Two derivatives, of x and of the weights, repeat the chain.
  of_x = lambda stacks, x, g: jax.vjp(lambda x: plain(stacks, x), x)[1](g)
  of_w = lambda stacks, x, g: jax.vjp(lambda s: plain(s, x), stacks)[1](g)
  twice = count(of_x, stacks, x, g) + count(of_w, stacks, x, g)
  assert twice > 1.3 * together


def test_w_sends_nothing():
  """And B no more than the joint pass, which gathers x once more."""
  with support.laid_out('tensor=2', 2) as mesh:
    args = placed()

    def w(tapes):
      made = jax.tree.map(lambda x: x[0], tapes).weight_gradients()
      return jax.tree.map(lambda x: x[None], made)

    sent = {}
    tapes = jax.eval_shape(in_region(apart), *args)[2]
    every = jax.shard_map(
      w, in_specs=(jax.P('tensor'),), out_specs=jax.P('tensor'), check_vma=False
    )
    for name, function, inputs in (
      ('joint', in_region(joint), args),
      ('b', in_region(apart), args),
      ('w', every, (tapes,)),
    ):
      text = jax.jit(function).lower(*inputs).compile().as_text()
      assert 'dot' in text
      sent[name] = hlo.by_kind(hlo.collectives(text, mesh))
  assert sent['w'] == {}
  # A tape takes no ring: W needs both factors gathered.
  assert 'collective-permute' in sent['joint']
  assert sent['b'].keys() == {'all-gather', 'reduce-scatter'}
  assert sum(sent['b'].values()) <= sum(sent['joint'].values())


def test_gradients_keep_the_dtypes_of_their_weights():
  """Factors are bfloat16, as the products; sums of them are not."""
  stacks, x, g = arrays(jnp.bfloat16)
  stacks = {p: jnp.asarray(v, jnp.float32) for p, v in stacks.items()}
  gx, _, tapes = jax.jit(apart)(stacks, x, g)
  assert {a.dtype for a in jax.tree.leaves(tapes)} == {jnp.dtype(jnp.bfloat16)}
  gx_joint, whole = jax.jit(joint)(stacks, x, g)
  assert gx.dtype == gx_joint.dtype == jnp.bfloat16
  for path, found in jax.jit(tape.Tapes.weight_gradients)(tapes).items():
    assert found.dtype == whole[path].dtype == jnp.float32
    np.testing.assert_allclose(found, whole[path], rtol=1e-5, atol=1e-5)


def test_an_unknown_weight_is_an_error():
  x, w = jnp.ones((B, T, D)), jnp.ones((D, F))
  run = lambda x: project.einsum('BTD,DF->BTF', x, RESIDUAL, w, UP, WIDE)
  with pytest.raises(ValueError, match='names no owner'):
    tape.Taped().run(0, run, x, None)
  assert project.tape() is None  # put back
