"""Context parallel attention as it is compiled: what is sent, and when.

What ring, rsa and token_ring send, by distance, is tested in
tests/train/claims/layouts/test_context.py. The schedule is that of a real TPU,
compiled ahead of time without one.
"""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest
import support

from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import compiled
from paraxis.sharding.meter import hlo
from paraxis.sharding.sequence import attention as context

N, L, HEADS, KV, WIDTH = 8, 64, 8, 2, 16
T = L // N
SPEC = P(None, 'context')


def array(mesh, length, *shape):
  """A (1, length, ..) array of a dtype, sharded over the context axis."""
  *rest, dtype = shape
  place = NamedSharding(mesh, SPEC)
  return jax.ShapeDtypeStruct((1, length, *rest), dtype, sharding=place)


def on(mesh, function, ins=SPEC, outs=SPEC):
  return jax.jit(
    jax.shard_map(
      function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False
    )
  )


def sent(form, layout='zigzag', window=0):
  """[{kind: (messages, bytes that a rank receives)}] forward and backward.

  They are two programs: in one, XLA merges a backward send with an equal
  forward one.
  """
  mesh = mesh_lib.make({'context': N})
  mask = attention_op.Mask(block=4, window=window)
  plan = context.ContextPlan(form, 'context', N, layout)

  def forward(q, k, v, rows):
    attend = lambda q, k, v: context.attention(q, k, v, rows, rows, mask, plan)
    o, back = jax.vjp(lambda *x: attend(*x)[0], q, k, v)
    return o, jax.tree.map(lambda x: x[None], back)  # one a rank

  def backward(back, do):
    return jax.tree.map(lambda x: x[0], back)(do)

  q, k = array(mesh, L, HEADS, WIDTH, 'f4'), array(mesh, L, KV, WIDTH, 'f4')
  ranks = P('context')
  first = on(mesh, forward, outs=(SPEC, ranks))
  first = first.lower(q, k, k, array(mesh, L, 'i4')).compile()
  o, back = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    first.out_info,
    first.output_shardings,
  )
  second = on(mesh, backward, ins=(ranks, SPEC)).lower(back, o).compile()
  return [
    {
      kind: (messages, size)
      for kind, _, messages, size in hlo.rows(
        hlo.collectives(program.as_text(), mesh)
      )
    }
    for program in (first, second)
  ]


# Bytes of a head of a rank's tokens, and of their positions and documents.
HEAD, INFO = 4 * T * WIDTH, 8 * T
ALL = 2 * (N - 1) * KV * HEAD
GATHER = {'all-gather': (3, ALL + (N - 1) * INFO)}
# Queries, output, keys and values, whose heads are repeated until they divide.
EVERY = {'all-to-all': (4, (N - 1) * (2 * HEADS + 2 * 8) * HEAD // N)}
# Groups of 4, which have 4 kv heads, in a ring of 2.
GROUP = {'all-to-all': (4, 3 * (2 * HEADS + 2 * 4) * HEAD // 4)}
TURN = 2 * 4 * HEAD + 4 * INFO
FORMULAS = {  # form -> (forward, backward)
  'all_gather': (GATHER, GATHER | {'reduce-scatter': (2, ALL)}),
  'ulysses': (EVERY | {'all-gather': (1, (N - 1) * INFO)}, EVERY),
  'usp': (
    GROUP | {'all-gather': (1, 3 * INFO), 'collective-permute': (3, TURN)},
    GROUP | {'collective-permute': (3 + 4, TURN + 2 * 2 * 4 * HEAD)},
  ),
}


@pytest.mark.parametrize('form', FORMULAS)
def test_what_is_sent_equals_the_formulas(form):
  assert sent(form) == list(FORMULAS[form])


def test_a_window_on_contiguous_shards_sends_less():
  """8 tokens a rank, a window of 11: two hops, not seven."""
  hops = 2 * (2 * KV * HEAD + INFO)
  # The last shift brings dk, dv home over both hops at once.
  home = 3 * 2 * KV * HEAD
  assert sent('ring', layout='contiguous', window=11) == [
    {'collective-permute': (2 * 3, hops)},
    {'collective-permute': (2 * 3 + 3 * 2, hops + home)},
  ]


def permutes_traced(policy):
  """Sends in the traced gradient of a ring under a rematerialisation policy."""
  mesh = mesh_lib.make({'context': N})
  plan = context.ContextPlan('ring', 'context', N, 'zigzag')

  def loss(q, k, rows):
    mask = attention_op.Mask(block=4)
    attend = lambda q, k: context.attention(q, k, k, rows, rows, mask, plan)
    if policy is not None:
      attend = jax.checkpoint(attend, policy=policy)
    return jax.grad(lambda q: attend(q, k)[0].sum())(q)

  x = array(mesh, L, 2, 4, 'f4')
  traced = jax.make_jaxpr(on(mesh, loss))(x, x, array(mesh, L, 'i4'))
  return str(traced).count('ppermute[')


def test_a_policy_that_keeps_attention_runs_the_ring_once():
  kept = jax.checkpoint_policies.save_only_these_names('attention')
  nothing = jax.checkpoint_policies.nothing_saveable
  assert permutes_traced(kept) == permutes_traced(None)
  assert permutes_traced(nothing) > permutes_traced(None)


# ----------------------------------------------------------------- schedule --


def scheduled(impl):
  """compiled.CompiledProgram of a ring's forward and backward pass on TPU."""
  topology, length = aot.topology('v5p:2x2x1'), 2048
  mesh = jax.sharding.Mesh(topology.devices, ('context',))
  mask = attention_op.Mask(block=128)
  plan = context.ContextPlan('ring', 'context', mesh.size, 'zigzag', 0, impl)

  def both(q, k, v, do, rows):
    attend = lambda q, k, v: context.attention(q, k, v, rows, rows, mask, plan)
    o, back = jax.vjp(lambda *x: attend(*x)[0], q, k, v)
    return o, back(do)

  q = array(mesh, length, 4, 128, jnp.bfloat16)
  k = array(mesh, length, 2, 128, jnp.bfloat16)
  with topology.context():
    rows = array(mesh, length, jnp.int32)
    traced = on(mesh, both).trace(q, k, k, q, rows)
  text = aot.compile_for(topology, 'ring', traced).as_text()
  return compiled.CompiledProgram(text)


def spans(program):
  """Sends that enclose a loop over blocks or a kernel, and that do not.

  -> two lists of (computation, array).
  """
  hidden, bare = [], []
  for home, listed in program.computations.items():
    encloses = {}  # name of a send under way -> whether it encloses one
    for i in listed.values():
      if i.opcode == 'while' or '"tpu_custom_call"' in i.rest:
        encloses = dict.fromkeys(encloses, True)
      elif i.opcode == 'collective-permute-start':
        encloses[i.name] = False
      elif i.opcode == 'collective-permute-done':
        (start,) = i.operands
        sends = hidden if encloses.pop(start) else bare
        array = listed[start].results[0]
        sends.append((home, array.dtype, array.shape))
    assert not encloses
  return hidden, bare


@support.compiles('tpu')
@pytest.mark.parametrize('impl', ['auto', 'xla'])
def test_on_a_tpu_every_send_of_a_ring_encloses_what_it_hides_behind(impl):
  program = scheduled(impl)
  hidden, bare = spans(program)
  names = {i.name for x in program.computations.values() for i in x.values()}
  for kernel in ('forward', 'dq', 'dkv'):
    ran = any(f'attention_tpu_{kernel}' in name for name in names)
    assert ran == (impl == 'auto')
  inside = [array for home, *array in hidden if home != program.entry]
  # k, v and their positions, twice; the sums dk and dv in float32.
  assert sorted(inside) == sorted(
    4 * [['bf16', (1, 2, 512, 128)]]
    + 2 * [['s32', (1, 2, 512)]]
    + 2 * [['f32', (1, 2, 512, 128)]]
  )
  # dk and dv, the last hop home.
  assert [home for home, *_ in bare] == 2 * [program.entry]


@support.compiles('tpu')
def test_the_schedule_check_would_find_sends_that_wait(monkeypatch):
  monkeypatch.setattr(lax, 'optimization_barrier', lambda tree: tree)
  program = scheduled('xla')
  _, bare = spans(program)
  assert any(home != program.entry for home, *_ in bare)
