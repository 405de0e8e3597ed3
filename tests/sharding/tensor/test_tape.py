"""B and W taken apart by tapes against one joint backward pass.

Two gated layers in a scan and one after it; products gather x (up and gate, a
group) and scatter y (down), and a scale belongs to no product.

Legend: B rows, T tokens, D model, F mlp, L layers.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
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


def layer(values, x):
  own = lambda path: project.Owned(values[path], f'layers/{path}')
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


def joint(stacks, x, g):
  """-> (gx, gradients) of one backward pass; without a tape."""

  def run(stacks, x):
    def body(x, values):
      return layer(values, x), None

    return lax.scan(body, x, stacks)[0]

  gradients, gx = jax.vjp(run, stacks, x)[1](g)
  return gx, gradients


def apart(stacks, x, g):
  """B -> (gx, gradients of what is on no tape, tapes, records)."""
  first = tape.Taped()
  shapes = jax.eval_shape(lambda: chain(stacks, x, first)[1])
  like = lambda s: jnp.zeros(s.shape, s.dtype)
  zeros = {
    part: [jax.tree.map(like, zero) for _, zero in records]
    for part, records in enumerate(shapes)
  }
  on_tape = {
    o for rows in first.static.values() for r in rows for o in r.owners
  }
  rest = {p: v for p, v in stacks.items() if f'layers/{p}' not in on_tape}
  run = lambda rest, x, zeros: chain(stacks | rest, x, tape.Taped(zeros))
  _, back, xs = jax.vjp(run, rest, x, zeros, has_aux=True)
  gradients, gx, gs = back(g)
  return gx, gradients, (xs, gs), first.static


def weights(records, tapes):
  """W -> gradients of what is on the tapes."""
  xs, gs = tapes
  found = {}
  for part in (0, 1):
    for record, x, g in zip(records[part], xs[part], gs[part], strict=True):
      multiply = functools.partial(tape.weight_gradients, record)
      made = (jax.vmap(multiply) if part == 0 else multiply)(x, g)
      for owner, dw in zip(record.owners, made, strict=True):
        found.setdefault(owner.removeprefix('layers/'), []).append(
          dw if part == 0 else dw[None]
        )
  return {path: jnp.concatenate(parts) for path, parts in found.items()}


def split(stacks, x, g):
  """B and then W, as `joint`."""
  gx, gradients, tapes, records = apart(stacks, x, g)
  late = weights(records, tapes)
  assert not late.keys() & gradients.keys()
  return gx, gradients | late


def mesh_of(world):
  return mesh_lib.make(world, jax.devices()[:2])


def in_region(function, out_names=None):
  """function(stacks, x, g) in a manual region; a shard's results are stacked
  on a new first axis, or, with names, put together."""
  specs = {p: annotate.spec(names) for p, names in NAMES.items()}
  rows = annotate.spec(RESIDUAL)

  def run(*args):
    found = function(*args)
    return found if out_names else jax.tree.map(lambda x: x[None], found)

  return jax.shard_map(
    run,
    in_specs=(specs, rows, rows),
    out_specs=(rows, specs) if out_names else jax.P('tensor'),
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
    gx, gradients = jax.device_get(
      support.jit(lambda *a: function(*a))(*arrays())
    )
  else:
    mesh = mesh_of(world)
    with jax.set_mesh(mesh):
      gx, gradients = support.jit(in_region(whole(function), NAMES))(
        *placed(mesh)
      )
      gx, gradients = jax.device_get((gx, gradients))
  return {'x': gx} | gradients


def placed(mesh):
  put = lambda x, names: jax.device_put(
    np.asarray(x), jax.NamedSharding(mesh, annotate.spec(names))
  )
  stacks, x, g = arrays()
  stacks = {p: put(v, NAMES[p]) for p, v in stacks.items()}
  return stacks, put(x, RESIDUAL), put(g, RESIDUAL)


@functools.cache
def wanted():
  """The joint gradients of a plain run."""
  return evaluate('plain', joint)


def wrong(found):
  assert found.keys() == wanted().keys()
  return {
    name
    for name, b in wanted().items()
    if not np.abs(found[name] - b).max() <= 1e-12 * np.abs(b).max()
  }


@pytest.mark.parametrize('world', WORLDS)
def test_apart_equals_joint(world):
  assert wanted().keys() == {'x', 'up', 'gate', 'down', 'scale'}
  assert not wrong(evaluate(world, joint))
  assert not wrong(evaluate(world, split))


@pytest.mark.parametrize('world', WORLDS)
@pytest.mark.parametrize('leaf', ['up', 'gate', 'down'])
def test_a_dropped_factor_shows_in_its_leaf(monkeypatch, world, leaf):
  right = tape.weight_gradients

  def dropped(record, x, gs):
    gs = [
      g * (owner != f'layers/{leaf}')
      for owner, g in zip(record.owners, gs, strict=True)
    ]
    return right(record, x, gs)

  monkeypatch.setattr(tape, 'weight_gradients', dropped)
  assert wrong(evaluate(world, split)) == {leaf}


def test_a_product_that_no_tape_records_stays_in_the_backward_pass(monkeypatch):
  right = tape.Tape.product

  def some(self, group, x, weights, owners):
    if group.equations != ('BTF,FD->BTD',):
      return right(self, group, x, weights, owners)
    with project.taped(None):
      (w,) = weights
      out = project.einsum(group.equations[0], x, group.x, w, *group.weights,
                           *group.outs)  # fmt: skip
    return [out]

  monkeypatch.setattr(tape.Tape, 'product', some)
  gradients = jax.eval_shape(lambda *a: apart(*a)[1], *arrays())
  assert gradients.keys() == {'scale', 'down'}
  assert not wrong(evaluate('plain', split))


def test_operations_of_b_and_w_are_those_of_one_pass():
  stacks, x, g = arrays()
  records = []

  def late(stacks, x, g):
    gx, gradients, tapes, made = apart(stacks, x, g)
    records.append(made)
    return gx, gradients, tapes

  count = lambda function, *a: flops.count(function, *a).total
  together, b = count(joint, stacks, x, g), count(late, stacks, x, g)
  tapes = jax.eval_shape(late, stacks, x, g)[2]
  w = count(functools.partial(weights, records[0]), tapes)
  assert abs((b + w) / together - 1) < 0.01
  # One of three products is W's: B makes no gradient of a weight.
  assert b == 2 * w
  # Two derivatives, of x and of the weights, repeat the chain.
  of_x = lambda stacks, x, g: jax.vjp(lambda x: joint_y(stacks, x), x)[1](g)
  of_w = lambda stacks, x, g: jax.vjp(lambda s: joint_y(s, x), stacks)[1](g)
  twice = count(of_x, stacks, x, g) + count(of_w, stacks, x, g)
  assert twice > 1.3 * together


def joint_y(stacks, x):
  return lax.scan(lambda x, v: (layer(v, x), None), x, stacks)[0]


def test_w_sends_nothing():
  """And B no more than the joint pass, which gathers x once more."""
  mesh, records = mesh_of('tensor=2'), []
  with jax.set_mesh(mesh):
    args = placed(mesh)

    def b(stacks, x, g):
      *found, made = apart(stacks, x, g)
      records.append(made)
      return found

    def w(tapes):
      mine = jax.tree.map(lambda x: x[0], tapes)
      made = weights(records[0], mine)
      return jax.tree.map(lambda x: x[None], made)

    sent = {}
    tapes = jax.eval_shape(in_region(b), *args)[2]
    every = jax.shard_map(
      w, in_specs=(jax.P('tensor'),), out_specs=jax.P('tensor'), check_vma=False
    )
    for name, function, inputs in (
      ('joint', in_region(joint), args),
      ('b', in_region(b), args),
      ('w', every, (tapes,)),
    ):
      text = support.jit(function).lower(*inputs).compile().as_text()
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
  records = []

  def both(stacks, x, g):
    gx, _, tapes, made = apart(stacks, x, g)
    records.append(made)
    return gx, tapes, weights(made, tapes)

  gx, tapes, late = support.jit(both)(stacks, x, g)
  assert {a.dtype for a in jax.tree.leaves(tapes)} == {jnp.dtype(jnp.bfloat16)}
  gx_joint, whole = support.jit(joint)(stacks, x, g)
  assert gx.dtype == gx_joint.dtype == jnp.bfloat16
  for path, found in late.items():
    assert found.dtype == whole[path].dtype == jnp.float32
    np.testing.assert_allclose(found, whole[path], rtol=1e-5, atol=1e-5)
  assert not any(r.group.ring for rows in records[0].values() for r in rows)


def test_an_unknown_weight_is_an_error():
  x, w = jnp.ones((B, T, D)), jnp.ones((D, F))
  run = lambda x: project.einsum('BTD,DF->BTF', x, RESIDUAL, w, UP, WIDE)
  with pytest.raises(ValueError, match='names no owner'):
    tape.Taped().run(0, run, x, None)
  assert project.tape() is None  # put back
