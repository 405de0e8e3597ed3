"""Products with parameters, and lookups, against numpy in all three worlds.

    y_i = einsum(x, w_i),  dx = sum_i einsum(c_i, w_i),  dw_i = einsum(x, c_i)

Legend: B rows, T tokens, D model, F mlp, N heads, K kv heads, H and P head
width, V rows of a table.
"""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.pallas_kernels import registry
from paraxis.sharding import annotate
from paraxis.sharding.tensor import lookup
from paraxis.sharding.tensor import project
from paraxis.sharding.tensor import rings as rings_lib
from paraxis.sharding.tensor import vocabulary
from paraxis.sharding.tensor import worlds

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, F, N, K, H, V = 8, 16, 8, 24, 8, 8, 2, 40
RESIDUAL = ('batch', 'residual_length', 'hidden')
ROWS, WIDE = ('batch', 'length'), ('batch', 'length', 'mlp')
QUERIES = ('batch', 'length', 'heads', 'head_dim')
KEYS = ('batch', 'length', 'kv_heads', 'head_dim')
LOGITS = ('batch', 'length', 'vocab')
UP, DOWN, TABLE = ('embed', 'mlp'), ('mlp', 'embed'), ('vocab', 'embed')
QUERY, KEY = ('embed', 'heads', 'head_dim'), ('embed', 'kv_heads', 'head_dim')
OUTPUT = ('heads', 'head_dim', 'embed')
SHAPES = dict(B=B, T=T, D=D, F=F, N=N, K=K, H=H, P=H, V=V)
# name: (names of x, [(equation, names of w, names of y)])
GROUPS = {
  'qkv': (RESIDUAL, [
    ('BTD,DNH->BTNH', QUERY, QUERIES), ('BTD,DKH->BTKH', KEY, KEYS),
    ('BTD,DKH->BTKH', KEY, KEYS)]),
  'output': (QUERIES, [('BTNP,NPD->BTD', OUTPUT, RESIDUAL)]),
  'gate_up': (RESIDUAL, [('BTD,DF->BTF', UP, WIDE)] * 2),
  'down': (WIDE, [('BTF,FD->BTD', DOWN, RESIDUAL)]),
  'logits': (RESIDUAL, [('BTD,VD->BTV', TABLE, LOGITS)]),
}  # fmt: skip
CUBE = 'data=2,fsdp=2,tensor=2'


def shape(letters):
  return tuple(SHAPES[a] for a in letters)


def parts(equation):
  ins, out = equation.split('->')
  return (*ins.split(','), out)


@functools.cache
def arrays():
  """{group: (x, [w], [cotangent of y])}."""
  rng, out = np.random.default_rng(0), {}
  for name, (_, products) in GROUPS.items():
    a, _, _ = parts(products[0][0])
    rows = [parts(e)[1:] for e, *_ in products]
    make = lambda letters: rng.normal(size=shape(letters))
    out[name] = make(a), [make(b) for b, _ in rows], [make(c) for _, c in rows]
  return out


@functools.cache
def expected():
  """{group: (ys, dx, dws)} in numpy."""
  out = {}
  for name, (x, ws, cs) in arrays().items():
    ys, dx, dws = [], 0, []
    for (equation, *_), w, c in zip(GROUPS[name][1], ws, cs, strict=True):
      a, b, y = parts(equation)
      ys.append(np.einsum(equation, x, w))
      dx = dx + np.einsum(f'{y},{b}->{a}', c, w)
      dws.append(np.einsum(f'{a},{y}->{b}', x, c))
    out[name] = ys, dx, dws
  return out


def differentiate(group, rings, x, ws, cs):
  """(ys, dx, dws), of local arrays in a region."""
  names, products = GROUPS[group]

  def run(x, ws):
    rows = [(e, w, n, y) for (e, n, y), w in zip(products, ws, strict=True)]
    return project.project(x, names, rows, ring=group in rings)

  ys, vjp = jax.vjp(run, x, ws)
  return ys, *vjp(cs)


def names_of(group):
  """Logical names of (x, ws, cs)."""
  x, products = GROUPS[group]
  return x, [w for _, w, _ in products], [y for *_, y in products]


def spec_tree(names):
  leaf = lambda n: isinstance(n, tuple) and not isinstance(n[0], tuple | list)
  return jax.tree.map(annotate.spec, names, is_leaf=leaf)


def sum_once(gradient, names):
  """Over the mesh axes absent from its layout."""
  held = {a for name in names for a in annotate.carriers(name)}
  left = tuple(a for a in annotate.sizes() if a not in held)
  return jax.lax.psum(gradient, left) if left else gradient


def manual(group, rings, share=lambda cs: cs):
  """`differentiate` in a region, as the explicit step does it."""
  x, ws, cs = names_of(group)

  def body(x, w, c):
    ys, dx, dws = differentiate(group, rings, x, w, share(c))
    return ys, dx, [sum_once(d, n) for d, n in zip(dws, ws, strict=True)]

  return jax.shard_map(
    body,
    in_specs=(spec_tree(x), spec_tree(ws), spec_tree(cs)),
    out_specs=(spec_tree(cs), spec_tree(x), spec_tree(ws)),
    check_vma=False,
  )


@pytest.fixture
def enter():
  """enter(mesh, kv_heads, **fields): support.laid_out until the test ends."""
  with contextlib.ExitStack() as stack:
    yield lambda mesh, kv_heads=K, **fields: stack.enter_context(
      support.laid_out(mesh, kv_heads, **fields)
    )


def place(tree, names):
  """NumPy arrays on the mesh in force."""
  return jax.device_put(tree, spec_tree(names))


def evaluate(world, rings=(), groups=tuple(GROUPS)):
  """{group: (ys, dx, dws)} on the mesh in force, compiled as one."""
  run = {
    g: manual(g, rings)
    if world == 'manual'
    else functools.partial(differentiate, g, rings)
    for g in groups
  }
  args = {g: place(arrays()[g], names_of(g)) for g in groups}
  return jax.jit(lambda args: {g: run[g](*args[g]) for g in groups})(args)


def compare(found):
  found = {g: (list(ys), dx, list(dws)) for g, (ys, dx, dws) in found.items()}
  support.close(found, {g: expected()[g] for g in found})


def test_without_a_mesh():
  for group, args in arrays().items():
    compare({group: differentiate(group, GROUPS, *args)})


@pytest.mark.parametrize('world', ['explicit', 'manual'])
@pytest.mark.parametrize(
  'mesh, choices, rings',
  [
    (CUBE, dict(zero=3), ()),  # weights gathered over fsdp and data
    ('context=2,tensor=4', {}, ()),
    ('data=8', dict(zero=3), ()),
    (CUBE, dict(zero=3), ('qkv', 'output', 'gate_up', 'down')),
    ('context=2,tensor=4', {}, ('qkv', 'down')),
  ],
)
def test_equal_to_numpy(enter, mesh, choices, rings, world):
  enter(mesh, **choices)
  found = evaluate(world, rings)
  compare(found)
  # Everything is laid out by its names.
  for group, (ys, dx, dws) in found.items():
    x, ws, cs = names_of(group)
    for y, n in zip((*ys, dx, *dws), (*cs, x, *ws), strict=True):
      want = jax.NamedSharding(jax.sharding.get_mesh(), annotate.spec(n))
      assert y.sharding.is_equivalent_to(want, y.ndim), (group, n)


@pytest.mark.parametrize('world', ['explicit', 'manual'])
def test_cotangents_before_inputs(enter, monkeypatch, world):
  """Or after, whichever is not usual; each result is transposed."""
  for group, args in arrays().items():
    monkeypatch.setattr(project, 'RESULT', -(10**6))
    compare({group: differentiate(group, (), *args)})
  enter(CUBE, zero=3)
  compare(evaluate(world))


@pytest.mark.parametrize(
  'equation, weight, x, y, copied',
  [
    # The input of an adapter; the cotangent of a head, whose words are first.
    ('BTF,FR->BTR', (F, 2), F, 2, F),
    ('BTF,RF->BTR', (8 * F, F), F, 8 * F, 8 * F),
  ],
)
def test_what_is_less_is_transposed(
  monkeypatch, equation, weight, x, y, copied
):
  names, (b, t), found = (None,) * 3, (2, 64), {}
  run = lambda a, x, c: jax.vjp(
    lambda a: project.einsum(equation, x, names, a, names[1:], names), a
  )[1](c)
  shapes = weight, (b, t, x), (b, t, y)
  arguments = [jax.ShapeDtypeStruct(s, 'f8') for s in shapes]
  for result in (1, 10**6):
    monkeypatch.setattr(project, 'RESULT', result)
    text = jax.jit(lambda *args: run(*args)).lower(*arguments).compile()
    lines = re.findall(rf'f64\[{copied},{b * t}\]', text.as_text() or '')
    found[result] = lines
  assert not found[1] and found[10**6], found


def test_whole_residuals_are_summed_by_the_compiler(enter):
  """mesh.sequence=False, under Explicit axes."""
  enter(CUBE, sequence=False)
  compare(evaluate('explicit'))


def test_few_kv_heads_are_whole_on_every_shard(enter):
  """Their cotangent is: each shard has what it read, the others zero."""
  enter('data=2,tensor=4', kv_heads=2)
  assert annotate.carriers('kv_heads') == ()
  compare(evaluate('explicit', groups=('qkv',)))

  def read(cs):  # a kv head is read by one of the shards each
    own = jnp.arange(K) % 4 == jax.lax.axis_index('tensor')
    return [cs[0], *(jnp.where(own[:, None], c, 0) for c in cs[1:])]

  args = place(arrays()['qkv'], names_of('qkv'))
  for rings in ((), ('qkv',)):
    compare({'qkv': jax.jit(manual('qkv', rings, read))(*args)})


def primitives(group, rings=()):
  """Collectives that the manual forward and backward pass of a group trace."""
  args = place(arrays()[group], names_of(group))
  text = str(jax.make_jaxpr(manual(group, rings))(*args))
  names = ('all_gather', 'reduce_scatter', 'ppermute')
  return tuple(text.count(f'= {p}[') for p in names)


def test_what_moves_in_a_region(enter):
  """x once for all weights of a group, once more backward; dx once."""
  enter('tensor=8')
  assert primitives('qkv') == primitives('gate_up') == (2, 1, 0)
  assert primitives('down') == primitives('output') == (1, 1, 0)
  # As rings: x on 7 hops; backward it travels again, dx the other way.
  assert primitives('qkv', ('qkv',)) == (0, 0, 7 + 14)
  assert primitives('down', ('down',)) == (0, 0, 7 + 7)


def test_what_moves_of_the_weights(enter):
  """ZeRO stage 3: each gathered twice, each gradient scattered once."""
  enter('data=8', zero=3)
  assert primitives('qkv') == (6, 3, 0) and primitives('down') == (2, 1, 0)


REDUCED = rings_lib._reduced
BREAKS = {  # what: (group, whether it is a ring, owner, name, instead)
  'a sum is one shard alone': (
    'down', False, jax.lax, 'psum_scatter',
    lambda x, axes, scatter_dimension, tiled: annotate.own(
      x, axes, scatter_dimension)),
  'a gather repeats what a shard has': (
    'gate_up', False, jax.lax, 'all_gather',
    lambda x, axes, axis, tiled: jnp.repeat(x, jax.lax.axis_size(axes), axis)),
  'terms of dx are not added': (
    'gate_up', False, worlds.Manual, 'add_terms',
    lambda self, ways, partial, whole, what: self.reduce(
      partial[0], ways[0].x_whole, ways[0].x, ways[0].summed_back, 'x')),
  'a send of a ring does nothing': (
    'gate_up', True, rings_lib, '_send', lambda x, *_: x),
  'sums of a ring go to a neighbour': (
    'down', True, rings_lib, '_reduced',
    lambda part, *how: REDUCED(lambda rank: part((rank + 1) % 2), *how)),
}  # fmt: skip


@pytest.mark.parametrize('what', BREAKS)
def test_a_broken_collective_is_seen(enter, monkeypatch, what):
  enter(CUBE)
  group, ring, *patch = BREAKS[what]
  monkeypatch.setattr(*patch)
  found = evaluate('manual', (group,) * ring, (group,))
  with pytest.raises(AssertionError):
    compare(found)


def refused(equation, x_names, w_names, out, world='manual'):
  """The message of the ValueError that tracing one product raises."""
  specs = annotate.spec(x_names), annotate.spec(w_names)

  def run(x, w):
    project.einsum(equation, x, x_names, w, w_names, out)
    return jnp.zeros(())

  if world == 'manual':
    run = jax.shard_map(run, in_specs=specs, out_specs=jax.P(), check_vma=False)
  args = [
    jax.ShapeDtypeStruct(shape(a), 'f8', sharding=s)
    for a, s in zip(parts(equation)[:2], specs, strict=True)
  ]
  with pytest.raises(ValueError) as e:
    jax.jit(run).trace(*args)
  return str(e.value)


ONE = ('batch', None, 'hidden')


@pytest.mark.parametrize(
  'equation, x, w, out, words',
  [
    # Doing nothing would leave a partial sum.
    ('BTF,FD->BTD', WIDE, DOWN, ('batch', 'length', 'hidden'),
     "a sum over ['tensor'] that no dimension of the result takes"),
    # Whole columns times a part of them.
    ('BTD,DF->BTF', RESIDUAL, (None, None), WIDE,
     "'F' is laid out over () in the parameter and over ('tensor',)"),
    # The output's name claims a layout that nothing makes.
    ('BTD,DF->BTF', ONE, UP, ('batch', 'residual_length', None),
     'move the operand first'),
    ('BTD,DF->BTF', ('batch', 'heads', 'hidden'), UP, ('heads', 'batch', None),
     'move the operand first'),
  ],
)  # fmt: skip
def test_a_region_refuses_what_would_be_silently_wrong(
  enter, equation, x, w, out, words
):
  enter(CUBE)
  assert words in refused(equation, x, w, out)


@pytest.mark.parametrize('world', ['explicit', 'manual'])
def test_one_mesh_axis_on_two_dimensions(enter, world):
  """Every shard would hold other tokens of other columns."""
  enter('tensor=8')
  out = ('batch', 'residual_length', 'mlp')
  text = refused('BTD,DF->BTF', RESIDUAL, UP, out, world)
  assert 'tensor' in text


def test_a_backward_sum_with_nowhere_to_go(enter):
  """Forward nothing is summed; backward dx is."""
  enter('tensor=8', sequence=False)
  with pytest.raises(ValueError) as e:
    primitives('gate_up')
  assert '(backward)' in str(e.value) and 'mesh.sequence' in str(e.value)


def test_products_of_a_group_gather_x_alike(enter):
  """One gather serves all: a product that wants x otherwise is refused."""
  enter('tensor=8')
  whole = ('BTD,DF->BTF', UP, WIDE)
  split = ('BTD,DF->BTF', ('embed', None), ('batch', 'residual_length', None))
  x, (w, _), _ = arrays()['gate_up']

  def run(x, w, v):
    rows = [(e, a, n, y) for a, (e, n, y) in zip((w, v), pair, strict=True)]
    return tuple(project.project(x, RESIDUAL, rows))

  for pair in ((whole, split), (split, whole)):
    names = RESIDUAL, *(n for _, n, _ in pair)
    region = annotate.region(run, names, [y for *_, y in pair])
    try:
      found = jax.jit(region)(*place((x, w, w), names))
    except ValueError:
      continue
    for y in found:
      np.testing.assert_allclose(y, x @ w, atol=1e-12)


# --- lookup

TABLES = [
  (CUBE, {}, TABLE),  # rows over tensor, length scattered over it
  (CUBE, dict(zero=3), TABLE),
  ('context=2,tensor=4', {}, TABLE),
  ('fsdp=8', {}, TABLE),
  (CUBE, {}, ('positions', 'embed')),  # whole rows, length split over tensor
]


def check_lookup(names, world):
  """Rows and gradient of the table, of sum(lookup * weights), against numpy."""
  rng = np.random.default_rng(0)
  table, ids = rng.normal(size=(V, D)), rng.integers(0, V, (B, T))
  ids[:, ::3] = 7  # often the same row
  weights = rng.normal(size=(B, T, D))

  def run(table, ids, weights):
    look = lambda t: lookup.lookup(t, names, ids, RESIDUAL, t.dtype)
    y, vjp = jax.vjp(look, table)
    (grad,) = vjp(weights)
    return y, sum_once(grad, names) if world == 'manual' else grad

  if world == 'manual':
    run = annotate.region(run, (names, ROWS, RESIDUAL), (RESIDUAL, names))
  args = place((table, ids, weights), (names, ROWS, RESIDUAL))
  want = np.zeros_like(table)
  np.add.at(want, ids, weights)
  y, grad = jax.jit(run)(*args)
  np.testing.assert_allclose(y, table[ids], rtol=1e-12)
  np.testing.assert_allclose(grad, want, rtol=1e-12, atol=1e-12)
  assert y.sharding.spec == annotate.spec(RESIDUAL)
  layout = jax.NamedSharding(jax.sharding.get_mesh(), annotate.spec(names))
  assert grad.sharding.is_equivalent_to(layout, 2)


@pytest.mark.parametrize('world', ['explicit', 'manual'])
@pytest.mark.parametrize('mesh, choices, names', TABLES)
def test_lookup(enter, mesh, choices, names, world):
  enter(mesh, **choices)
  check_lookup(names, world)


def test_lookup_with_whole_residuals(enter):
  """mesh.sequence=False: the rows stay where they are."""
  enter(CUBE, sequence=False)
  check_lookup(TABLE, 'explicit')
  with pytest.raises(ValueError, match='they must be the same'):
    check_lookup(TABLE, 'manual')


def test_a_lookup_that_is_not_summed_is_seen(enter, monkeypatch):
  enter(CUBE)
  monkeypatch.setattr(
    vocabulary,
    'embedding',
    lambda table, ids, rows, dtype, shared: annotate.own(
      table[ids % len(table)].astype(dtype), rows, 1
    ),
  )
  with pytest.raises(AssertionError, match='Not equal to tolerance'):
    check_lookup(TABLE, 'manual')


# --- bfloat16


def test_the_weight_gradient_of_bfloat16_is_summed_in_float32():
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(4, 256, 8)), jnp.bfloat16)
  w = jnp.asarray(rng.normal(size=(8, 6)), jnp.float32)
  g = jnp.asarray(rng.normal(size=(4, 256, 6)), jnp.bfloat16)

  def y(w):
    return project.einsum('BTD,DF->BTF', x, RESIDUAL, w, UP, WIDE)

  dw = jax.vjp(y, w)[1](g)[0]
  exact = np.einsum('BTD,BTF->DF', *(np.asarray(a, np.float64) for a in (x, g)))
  error = lambda got: np.abs(np.asarray(got, np.float64) - exact).max()
  assert y(w).dtype == jnp.bfloat16 and dw.dtype == jnp.float32
  assert error(dw) < 1e-4
  assert error(dw.astype(jnp.bfloat16)) > 1e-3  # what rounding would cost


@pytest.mark.parametrize('platform, wide', [('cpu', 'float32'), ('tpu', None)])
def test_what_xla_on_a_cpu_multiplies_fast(monkeypatch, platform, wide):
  """y and dx of bfloat16: sums are float32, and bfloat16 leaves the product."""
  target = registry.Target(platform, platform)
  monkeypatch.setattr(registry, 'current_target', lambda: target)
  x, w = (jnp.ones(s, jnp.bfloat16) for s in ((2, 4, D), (D, F)))
  call = lambda x, w: project.einsum('BTD,DF->BTF', x, RESIDUAL, w, UP, WIDE)
  traced = jax.make_jaxpr(lambda x, w: jax.vjp(call, x, w)[1](call(x, w)))(x, w)
  sums = [
    str(e.params['preferred_element_type'])
    for e in traced.jaxpr.eqns if e.primitive.name == 'dot_general'
  ]  # fmt: skip
  assert sums == [wide or 'bfloat16'] * len(sums) and len(sums) >= 3
  assert {v.aval.dtype.name for v in traced.jaxpr.outvars} == {'bfloat16'}


@pytest.mark.parametrize(
  'group, wanted',
  # The gate's y sums embed, which is whole, its dx mlp over tensor, its dw rows
  # over data; what is summed over a mesh axis is sent as narrow as before.
  [('gate_up', 'yy'), ('down', 'x'), ('logits', 'y')],
)
def test_only_whole_sums_are_widened_on_a_mesh(enter, group, wanted):
  enter('data=2,tensor=4')
  x, ws, cs = arrays()[group]
  narrow = lambda a: np.asarray(a, jnp.bfloat16)
  x, ws, cs = place(jax.tree.map(narrow, (x, ws, cs)), names_of(group))
  run = functools.partial(differentiate, group, ())
  found = []
  for e in jax.make_jaxpr(run)(x, ws, cs).jaxpr.eqns:
    if e.primitive.name == 'dot_general':
      wide = e.params['preferred_element_type'] == jnp.float32
      found += [e.outvars[0].aval.shape] * wide
  shapes = {'y': cs[0].shape, 'x': x.shape}
  assert sorted(found) == sorted(shapes[kind] for kind in wanted)


def test_wide_outputs_of_narrow_products(enter):
  """Logits in float32 from bfloat16; dx goes back in bfloat16."""
  enter('data=2,tensor=4')
  x, (w,), (c,) = arrays()['logits']
  x = place(np.asarray(x, jnp.bfloat16), RESIDUAL)
  w, c = place((w.astype('f4'), c.astype('f4')), (TABLE, LOGITS))

  def run(x, w, c):
    product = lambda x, w: project.einsum(
      'BTD,VD->BTV', x, RESIDUAL, w, TABLE, LOGITS, jnp.float32
    )
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(c)

  y, dx, dw = jax.jit(run)(x, w, c)
  assert [a.dtype.name for a in (y, dw, dx)] == 2 * ['float32'] + ['bfloat16']
  x, w = (np.asarray(a.astype(jnp.bfloat16), 'f8') for a in (x, w))
  want = np.einsum('btd,vd->btv', x, w)
  np.testing.assert_allclose(y, want, atol=1e-4)


@pytest.mark.parametrize('wide', [jnp.float32, jnp.bfloat16])
def test_blocks_of_heads_in_bfloat16(wide):
  """A letter that all operands share: XLA on CPU lacks the mixed product."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  x, w, g = draw(4, 64, 2, 8), draw(2, 8, 6), draw(4, 64, 2, 6)
  w = w.astype(jnp.float32)
  names = ('heads', None, 'head_dim')

  def run(x, w):
    y = project.einsum('BTNH,NHP->BTNP', x, QUERIES, w, names, QUERIES, wide)
    return (y * g).astype(jnp.float32).sum(), y

  (_, y), (dx, dw) = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(
    x, w
  )
  assert (y.dtype, dx.dtype, dw.dtype) == (wide, jnp.bfloat16, jnp.float32)
  x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
  y, dx, dw = (np.asarray(a, np.float64) for a in (y, dx, dw))
  close = lambda a, b, rtol: np.abs(a - b).max() <= rtol * np.abs(b).max()
  narrow = wide == jnp.bfloat16
  assert close(y, np.einsum('btnh,nhp->btnp', x, w), 4e-3 if narrow else 1e-6)
  assert close(dx, np.einsum('btnp,nhp->btnh', g, w), 4e-3)
  assert close(dw, np.einsum('btnh,btnp->nhp', x, g), 1e-6)


@pytest.mark.parametrize('mesh', ['', 'tensor=8', 'fsdp=8'])
def test_the_gradient_of_a_table_is_summed_in_its_own_dtype(enter, mesh):
  """A token of 1024 in a batch: in bfloat16 its sum stops at 256."""
  if mesh:
    enter(mesh)
  ids = np.zeros((8, 1024), np.int32)
  table = np.ones((16, 8), np.float32)
  if mesh:
    table, ids = place((table, ids), (TABLE, ROWS))

  def run(table, ids):
    look = lambda t: lookup.lookup(t, TABLE, ids, RESIDUAL, jnp.bfloat16)
    y, vjp = jax.vjp(look, table)
    return y, vjp(jnp.ones_like(y))[0]

  y, grad = jax.jit(run)(table, ids)
  assert (y.dtype, grad.dtype) == (jnp.bfloat16, jnp.float32)
  grad = np.asarray(grad)
  assert (grad[0] == 8 * 1024).all() and not grad[1:].any(), grad[:2]
