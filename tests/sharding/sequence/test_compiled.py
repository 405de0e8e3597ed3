"""Context parallel attention as it is compiled: what is sent, and when.

Sends are counted in the text of the compiled program, loops multiplied by their
trip counts, forward and backward as two programs (in one, XLA merges a backward
send with an equal forward one). The schedule is that of a real TPU, compiled
ahead of time without one.
"""

import collections
import re

import jax
from jax import lax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.sharding.sequence import attention as context

N, L, HEADS, KV, WIDTH = 8, 64, 8, 2, 16
T = L // N
SPEC = P(None, 'context')


def array(mesh, length, *shape):
  """A (1, length, ..) array of a dtype, sharded over the context axis."""
  *rest, dtype = shape
  place = NamedSharding(mesh, SPEC)
  return jax.ShapeDtypeStruct((1, length, *rest), dtype, sharding=place)


def compiled(form, inner=0, layout='zigzag', window=0):
  """Texts of the forward and of the backward program."""
  mesh = jax.make_mesh((N,), ('context',))
  mask = attention_op.Mask(block=4, window=window)
  plan = context.ContextPlan(form, 'context', N, layout, inner)

  def forward(q, k, v, rows):
    attend = lambda q, k, v: context.attention(q, k, v, rows, rows, mask, plan)
    o, back = jax.vjp(lambda *x: attend(*x)[0], q, k, v)
    return o, jax.tree.map(lambda x: x[None], back)  # one a rank

  def backward(back, do):
    return jax.tree.map(lambda x: x[0], back)(do)

  def lower(f, out, *args):
    run = jax.shard_map(f, mesh=mesh, out_specs=out, check_vma=False)
    return jax.jit(run).lower(*args)

  q, k = array(mesh, L, HEADS, WIDTH, 'f4'), array(mesh, L, KV, WIDTH, 'f4')
  rows, out = array(mesh, L, 'i4'), (SPEC, P('context'))
  first = lower(forward, out, q, k, k, rows).compile()
  o, back = first.out_info
  back, do = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    (back, o),
    (first.output_shardings[1], first.output_shardings[0]),
  )
  second = lower(backward, SPEC, back, do).compile()
  return first.as_text(), second.as_text()


# -------------------------------------------------------------------- bytes --

KINDS = 'all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce'


def computations(text):
  """Name -> lines; '' is the entry."""
  out, name = {}, None
  for line in text.splitlines():
    head = re.match(r'(ENTRY )?%(\S+) \(', line)
    if head:
      name = '' if head[1] else head[2]
      out[name] = []
    elif name is not None:
      out[name].append(line)
  return out


def sent(text):
  """{kind: rows of heads received by a rank} of float32 arrays, and counts.

  A row of a head is T x WIDTH numbers, the unit of the table in
  sharding/sequence/attention.py.
  """
  parts = computations(text)

  def visit(name):
    size, count = collections.Counter(), collections.Counter()
    for line in parts[name]:
      shapes, _, rest = line.partition(' = ')[2].partition('(')
      if shapes == '':  # a tuple type: its bracket came first
        shapes, _, rest = rest.partition(') ')
      kind = re.search(rf'({KINDS})(-start)?(\(|$)', line.partition(' = ')[2])
      if kind and 'f32[' in shapes:
        full = sum(
          int(np.prod([int(d) for d in s.split(',') if d]))
          for s in re.findall(r'f32\[([\d,]*)\]', shapes)
        )
        groups = re.search(r'replica_groups=\{\{([\d,]+)\}', line)
        g = len(groups[1].split(',')) if groups else N
        iota = re.search(r'replica_groups=\[\d+,(\d+)\]', line)
        g = int(iota[1]) if iota else g
        share = {'collective-permute': 1, 'reduce-scatter': g - 1}
        full *= share.get(kind[1], (g - 1) / g)
        size[kind[1]] += full / (T * WIDTH)
        count[kind[1]] += 1
      loop = re.search(r' while\(.*body=%([\w.\-]+)', line)
      if loop:
        trips = int(re.search(r'known_trip_count":\{"n":"(\d+)"', line)[1])
        inner = visit(loop[1])
        for total, part in zip((size, count), inner, strict=True):
          total.update({k: trips * x for k, x in part.items()})
    return size, count

  size, count = visit('')
  return {k: float(round(x, 6)) for k, x in size.items()}, dict(count)


def permutes(count, size):
  return {'collective-permute': size}, {'collective-permute': count}


RING = 2 * (N - 1) * KV
FORMULAS = {  # form -> (bytes, counts) of the forward and the backward program
  'all_gather': (
    ({'all-gather': RING}, {'all-gather': 2}),
    (
      {'all-gather': RING, 'reduce-scatter': RING},
      {'all-gather': 2, 'reduce-scatter': 2},
    ),
  ),
  'ring': (
    permutes(2 * (N - 1), RING),
    permutes(2 * (N - 1) + 2 * N, RING + 2 * N * KV),
  ),
  'rsa': (
    permutes(2 * (N - 1), RING),
    permutes(2 * (N - 1) + 2 * N, RING + 2 * N * KV),
  ),
  'token_ring': (
    permutes(3 * (N - 1), (N - 1) * (2 * HEADS + HEADS / WIDTH)),
    permutes(5 * (N - 1), (N - 1) * (3 * HEADS + 2 * HEADS / WIDTH)),
  ),
  'ulysses': 2
  * (({'all-to-all': (N - 1) / N * (2 * HEADS + 2 * 8)}, {'all-to-all': 4}),),
  'usp': (  # groups of 4, a ring of 2, 4 kv heads
    (
      {'all-to-all': 3 / 4 * (2 * HEADS + 2 * 4), 'collective-permute': 2 * 4},
      {'all-to-all': 4, 'collective-permute': 2},
    ),
    (
      {
        'all-to-all': 3 / 4 * (2 * HEADS + 2 * 4),
        'collective-permute': 2 * 4 + 2 * 2 * 4,
      },
      {'all-to-all': 4, 'collective-permute': 2 + 4},
    ),
  ),
}


@pytest.mark.parametrize('form', FORMULAS)
def test_what_is_sent_equals_the_formulas(form):
  for text, formula in zip(compiled(form), FORMULAS[form], strict=True):
    assert sent(text) == formula


def test_a_window_on_contiguous_shards_sends_less():
  """8 tokens a rank, a window of 11: two hops, not seven."""
  forward, backward = compiled('ring', layout='contiguous', window=11)
  assert sent(forward) == permutes(2 * 2, 2 * 2 * KV)
  # The last shift brings dk, dv home over both hops at once.
  assert sent(backward) == permutes(2 * 2 + 2 * 3, 2 * 2 * KV + 2 * 3 * KV)


def permutes_traced(policy):
  """Sends in the traced gradient of a ring under a rematerialisation policy."""
  mesh = jax.make_mesh((N,), ('context',))
  plan = context.ContextPlan('ring', 'context', N, 'zigzag')

  def loss(q, k, rows):
    mask = attention_op.Mask(block=4)
    attend = lambda q, k: context.attention(q, k, k, rows, rows, mask, plan)
    if policy is not None:
      attend = jax.checkpoint(attend, policy=policy)
    return jax.grad(lambda q: attend(q, k)[0].sum())(q)

  run = jax.shard_map(
    loss, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False
  )
  x = array(mesh, L, 2, 4, 'f4')
  text = str(jax.make_jaxpr(run)(x, x, array(mesh, L, 'i4')))
  return text.count('ppermute[')


def test_a_policy_that_keeps_attention_runs_the_ring_once():
  kept = jax.checkpoint_policies.save_only_these_names('attention')
  nothing = jax.checkpoint_policies.nothing_saveable
  assert permutes_traced(kept) == permutes_traced(None)
  assert permutes_traced(nothing) > permutes_traced(None)


# ----------------------------------------------------------------- schedule --


@pytest.fixture
def tpus(monkeypatch):
  """Four v5p chips that are not there."""
  pytest.importorskip('libtpu', reason='compiling for TPU needs jax[tpu]')
  for name, value in dict(
    ALLOW_MULTIPLE_LIBTPU_LOAD='1',
    TPU_SKIP_MDS_QUERY='1',
    TPU_WORKER_HOSTNAMES='localhost',
    TPU_ACCELERATOR_TYPE='v5p-8',
  ).items():
    monkeypatch.setenv(name, value)
  return topologies.get_topology_desc('v5p:2x2x1', platform='tpu').devices


def scheduled(devices):
  """Text of a ring's forward and backward pass, compiled for TPU."""
  mesh = Mesh(np.array(devices), ('context',))
  n, length = len(devices), 2048
  mask = attention_op.Mask(block=128)
  plan = context.ContextPlan('ring', 'context', n, 'zigzag')

  def both(q, k, v, do, rows):
    attend = lambda q, k, v: context.attention(q, k, v, rows, rows, mask, plan)
    o, back = jax.vjp(lambda *x: attend(*x)[0], q, k, v)
    return o, back(do)

  q = array(mesh, length, 4, 128, jnp.bfloat16)
  k = array(mesh, length, 2, 128, jnp.bfloat16)
  run = jax.shard_map(
    both, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False
  )
  with jax.default_device(devices[0]):
    lowered = jax.jit(run).lower(q, k, k, q, array(mesh, length, jnp.int32))
    return lowered.compile().as_text()


def spans(text):
  """Sends that enclose a loop, and that do not: [(computation, shape), ...]."""
  hidden, bare = [], []
  for name, lines in computations(text).items():
    begun = {}
    for at, line in enumerate(lines):
      start = re.search(
        r'%(\S+) = \((\w+\[[\d,]*\]).* \S+permute-start\(', line
      )
      if start:
        begun[start[1]] = at, start[2]
      done = re.search(r'collective-permute-done\(%([^)]*)\)', line)
      if done:
        first, shape = begun.pop(done[1])
        loops = any(' while(' in x for x in lines[first:at])
        (hidden if loops else bare).append((name, shape))
    assert not begun
  return hidden, bare


@pytest.mark.aot
def test_on_a_tpu_every_send_of_a_ring_encloses_the_loop_over_blocks(tpus):
  hidden, bare = spans(scheduled(tpus))
  inside = [shape for name, shape in hidden if name]
  # k, v and their positions, twice; the sums dk and dv in float32.
  assert sorted(inside) == sorted(
    4 * ['bf16[1,2,512,128]'] + 2 * ['s32[1,2,512]'] + 2 * ['f32[1,2,512,128]']
  )
  assert [name for name, _ in bare] == ['', '']  # dk and dv, the last hop home


@pytest.mark.aot
def test_the_schedule_check_would_find_sends_that_wait(tpus, monkeypatch):
  monkeypatch.setattr(lax, 'optimization_barrier', lambda tree: tree)
  _, bare = spans(scheduled(tpus))
  assert any(name for name, _ in bare)
