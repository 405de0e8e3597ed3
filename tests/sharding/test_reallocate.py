"""Arrays move between layouts bitwise, with the fewest bytes.

The reference is NumPy: a shard is the host's array at the shard's index, and
what a device lacks is a set of element numbers.
"""

import itertools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import pieces
from paraxis.sharding import reallocate
from paraxis.sharding.checkpoint import store

PATHS = 'stack', 'matrix', 'half', 'mask', 'empty', 'number'


def host(seed=0):
  """{path: array} of several types; 12 rows: in 2, 3 and 4 parts."""
  rng = np.random.default_rng(seed)
  values = [
    rng.standard_normal((2, 12, 8)).astype(np.float32),
    rng.standard_normal((24, 16)).astype(np.float32),
    rng.standard_normal((24, 16)).astype(jnp.bfloat16),
    rng.integers(0, 2, (24,)).astype(bool),
    np.zeros((0, 8), np.float32),
    np.asarray(seed, np.int32),
  ]
  return dict(zip(PATHS, values, strict=True))


def layout(mesh, first, *specs):
  """{path: NamedSharding} on the devices from the `first` on."""
  sizes = mesh_lib.parse(mesh)
  count = np.prod(list(sizes.values()), dtype=int)
  mesh = mesh_lib.make(sizes, jax.devices()[first : first + count])
  stack, matrix, vector = specs
  every = [stack, matrix, matrix, vector, P(), P()]
  return {p: NamedSharding(mesh, s) for p, s in zip(PATHS, every, strict=True)}


def layouts():
  """Name -> layout: on all devices, on halves, on 3 of them, on one."""
  columns = P(None, 'fsdp', 'tensor'), P('tensor', 'fsdp'), P('fsdp')
  return {
    'rows of 8': layout(
      'fsdp=8', 0, P(None, None, 'fsdp'), P('fsdp'), P('fsdp')
    ),
    'all': layout('data=2,fsdp=2,tensor=2', 0, *columns),
    'two axes on one dimension': layout(
      'data=2,tensor=4', 0, P('data'), P(('data', 'tensor')), P('tensor')
    ),
    'replicated': layout('context=8', 0, P(), P(), P()),
    'first half': layout('fsdp=2,tensor=2', 0, *columns),
    'last half': layout('fsdp=4', 4, P(None, 'fsdp'), P('fsdp'), P('fsdp')),
    'three': layout('fsdp=3', 3, P(None, 'fsdp'), P('fsdp'), P('fsdp')),
    'one': layout('data=1', 6, P(), P(), P()),
  }


ALL = layouts()
PAIRS = list(itertools.product(ALL, ALL))
pairs = pytest.mark.parametrize('source, target', PAIRS, ids=' -> '.join)


def whole(tree, wanted, like):
  """Whether every shard is the host's array at its index, bit for bit."""
  return set(tree) == set(wanted) and all(
    x.sharding == like[path]
    and x.dtype == wanted[path].dtype
    and {s.device for s in x.addressable_shards} == like[path].device_set
    and all(
      np.asarray(s.data).tobytes() == wanted[path][s.index].tobytes()
      for s in x.addressable_shards
    )
    for path, x in tree.items()
  )


def lacking(arrays, source, target):
  """{device: bytes} of the elements that each device wants and has not."""
  found = {}
  for path, x in arrays.items():
    number = np.arange(x.size).reshape(x.shape)
    held, wanted = (
      {
        device: set(np.ravel(number[index]))
        for device, index in on[path].devices_indices_map(x.shape).items()
      }
      for on in (source, target)
    )
    for device, elements in wanted.items():
      lacks = len(elements - held.get(device, set())) * x.dtype.itemsize
      found[device] = found.get(device, 0) + lacks
  return found


@pytest.fixture
def transfers(monkeypatch):
  """{device: bytes} that `send` brings from another device, as it goes on."""
  found, real = {}, reallocate.send

  def send(arrays, devices):
    for x, device in zip(arrays, devices, strict=True):
      assert x.devices() != {device}
      found[device] = found.get(device, 0) + x.nbytes
    with jax.transfer_guard('allow'):
      return real(arrays, devices)

  monkeypatch.setattr(reallocate, 'send', send)
  return found


@pytest.mark.sampled(8)
@pairs
def test_any_layout_to_any_with_the_fewest_bytes(source, target, transfers):
  source, target, tree = ALL[source], ALL[target], host()
  arrays = jax.device_put(tree, source)
  bound = lacking(tree, source, target)
  assert reallocate.received(arrays, target) == bound
  del arrays['empty']  # is put, no bytes
  to = {p: s for p, s in target.items() if p in arrays}
  # Nothing else crosses between devices, or from the host.
  with jax.transfer_guard('disallow_explicit'):
    moved = reallocate.move(arrays, to)
  assert whole(moved, {p: tree[p] for p in to}, target)
  assert transfers == {d: n for d, n in bound.items() if n}
  assert whole(arrays, {p: tree[p] for p in to}, source)  # still there


def test_as_through_the_disk(tmp_path):
  tree, source, target = host(3), ALL['all'], ALL['last half']
  arrays, axes = jax.device_put(tree, source), {}
  axes = {path: (None,) * x.ndim for path, x in tree.items()}
  with store.Store(tmp_path) as s:
    s.save(0, arrays, axes, {})
    like = {
      path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target[path])
      for path, x in tree.items()
    }
    disk, _ = s.restore(0, like)
  moved = reallocate.move(arrays, target)
  assert whole(moved, tree, target) and whole(disk, tree, target)
  assert not whole(moved, host(4), target)  # `whole` can fail
  assert not whole(moved, tree, source)


def test_any_tree_and_there_and_back():
  tree, on = host(), ALL['three']
  state = {'params': [tree['matrix'], (tree['mask'],)], 'step': tree['number']}
  put = lambda on: jax.tree.map(
    lambda x, s: jax.device_put(x, s), state, place(on)
  )
  place = lambda on: {
    'params': [on['matrix'], (on['mask'],)],
    'step': on['number'],
  }
  there = reallocate.move(put(ALL['all']), place(on))
  back = reallocate.move(there, place(ALL['all']))
  same = lambda a, b: a.sharding == b.sharding and np.array_equal(a, b)
  assert jax.tree.all(jax.tree.map(same, there, put(on)))
  assert jax.tree.all(jax.tree.map(same, back, put(ALL['all'])))


def test_arrays_on_no_device_of_choice_and_keys():
  """Uncommitted arrays lie on the first device, whatever the default is now."""
  mesh = ALL['last half']['matrix'].mesh
  on, key = NamedSharding(mesh, P('fsdp')), jax.random.key(0)
  x, keys = jnp.arange(8.0), jax.random.split(key, 4)
  half = NamedSharding(mesh_lib.make('data=2', jax.devices()[:2]), P('data'))
  with jax.default_device(jax.devices()[3]):
    moved = reallocate.move((x, x, keys), (on, half, on))
  assert np.array_equal(moved[0], np.arange(8.0))
  assert np.array_equal(moved[1], np.arange(8.0))
  assert np.array_equal(*map(jax.random.key_data, (moved[2], keys)))


def test_what_stays_is_not_copied(transfers):
  arrays = jax.device_put(host(), ALL['replicated'])
  moved = reallocate.move(arrays, ALL['replicated'])
  places = lambda x: [
    s.data.unsafe_buffer_pointer() for s in x.addressable_shards
  ]
  assert places(moved['matrix']) == places(arrays['matrix'])
  reallocate.move(arrays, ALL['all'])
  assert not transfers  # every device holds all


def test_a_donated_array_is_gone_and_never_wrong():
  source, target = ALL['rows of 8'], ALL['rows of 8']
  arrays = jax.device_put(host(), source)
  moved = reallocate.move(arrays, target)
  jax.jit(lambda x: x * 0, donate_argnums=0)(arrays['matrix'])
  with pytest.raises(RuntimeError, match='deleted'):
    np.asarray(moved['matrix'])


def test_holders_send_in_turn():
  """A block that four devices hold goes to four others from one each."""
  old = layout('context=4', 0, P(), P(), P())
  new = layout('context=4', 4, P(), P(), P())
  x = host()['matrix']
  boxes = lambda on: tuple(
    (d, tuple(c.indices(n)[:2] for c, n in zip(i, x.shape, strict=True)))
    for d, i in on['matrix'].devices_indices_map(x.shape).items()
  )
  plan = pieces.plan_of(((x.dtype, boxes(old), boxes(new)),))
  assert len(plan.messages) == 4 == len({m.sender for m in plan.messages})


def test_parts_for_the_same_devices_are_one_message(transfers, monkeypatch):
  arrays = jax.device_put(host(), ALL['all'])
  several = {f'{p}{i}': x for i in range(3) for p, x in arrays.items()}
  to = {path: ALL['rows of 8'][path[:-1]] for path in several}
  counts, real = [], reallocate.send
  monkeypatch.setattr(
    reallocate, 'send', lambda *all: counts.append(len(all[1])) or real(*all)
  )
  reallocate.move(arrays, ALL['rows of 8'])
  reallocate.move(several, to)
  assert counts[0] == counts[1] > 0
  # Large parts are joined by rows, if those are equal.
  monkeypatch.setattr(pieces, 'FLAT', 0)
  pieces.plan_of.cache_clear()
  moved = reallocate.move(several, to)
  pieces.plan_of.cache_clear()
  assert counts[2] > counts[0] and counts[2] < 3 * counts[0]
  thrice = {f'{p}{i}': x for i in range(3) for p, x in host().items()}
  assert whole(moved, thrice, to)


@pytest.mark.parametrize('name, wrong', [
  ('send', lambda arrays, devices: [
    jax.device_put(jnp.zeros_like(x), d)
    for x, d in zip(arrays, devices, strict=True)
  ]),
  ('_grid', lambda parts: jax.lax.concatenate(
    [jnp.ravel(x) for _, x in parts], 0
  ).reshape([  # joined, and not in place
    max(b[axis][1] for b, _ in parts) - min(b[axis][0] for b, _ in parts)
    for axis in range(len(parts[0][0]))
  ])),
])  # fmt: skip
def test_a_wrong_move_is_seen(name, wrong, monkeypatch):
  arrays = jax.device_put(host(), ALL['all'])
  monkeypatch.setattr(reallocate, name, wrong)
  jax.clear_caches()
  moved = reallocate.move(arrays, ALL['rows of 8'])
  jax.clear_caches()
  assert not whole(moved, host(), ALL['rows of 8'])


def test_whole_blocks_are_more_bytes(transfers, monkeypatch):
  source, target = ALL['all'], ALL['two axes on one dimension']
  arrays = jax.device_put(host(), source)
  monkeypatch.setattr(pieces, 'sent', lambda block, part: block)
  pieces.plan_of.cache_clear()
  moved = reallocate.move(arrays, target)
  pieces.plan_of.cache_clear()
  assert whole(moved, host(), target)
  bound = lacking(host(), source, target)
  assert sum(transfers.values()) > 1.2 * sum(bound.values())


def refused(tree, shardings, *words):
  with pytest.raises(errors.UserError) as e:
    reallocate.move(tree, shardings)
  assert '\n' not in str(e.value) and len(str(e.value)) < 250
  for word in words:
    assert word in str(e.value), e.value


def test_bad_input_is_one_line(monkeypatch):
  arrays, target = jax.device_put(host(), ALL['all']), ALL['rows of 8']
  fsdp = target['matrix']
  refused(
    dict(arrays, odd=jnp.zeros((6, 4))), dict(target, odd=fsdp),
    'odd', '(6, 4)', 'fsdp=8', 'does not divide',
  )  # fmt: skip
  refused({'a': jnp.zeros(())}, {'a': fsdp}, 'a: shape ()', 'fsdp=8')
  less = {p: s for p, s in target.items() if p != 'mask'}
  refused(arrays, less, 'no layout for mask (1)', '6 arrays, 5 layouts')
  refused(arrays, dict(less, musk=fsdp), 'for mask (1); no array for musk (1)')
  refused({'a': {'b': arrays['mask']}}, {'a/b': fsdp}, 'no layout for a/b')
  refused({'a': np.zeros(8)}, {'a': fsdp}, 'a is ndarray, on no device')
  refused({'a': arrays['mask']}, {'a': P()}, 'a: P', 'names no devices')
  pinned = fsdp.with_memory_kind('pinned_host')
  refused({'a': arrays['mask']}, {'a': pinned}, 'a is to', 'pinned_host')
  with jax.set_mesh(fsdp.mesh):
    refused(arrays, target, 'within jax.set_mesh')
  inside = lambda x: reallocate.move({'a': x}, {'a': fsdp})['a']
  with pytest.raises(errors.UserError, match='a is .*Tracer, on no device'):
    jax.jit(inside)(arrays['mask'])
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  refused(arrays, target, 'is of process 0, this is process 1', 'checkpoint')
