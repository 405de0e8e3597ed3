"""The text of compiled programs: what is read, and how often a loop turns."""

import jax
import jax.numpy as jnp
import pytest

from paraxis.sharding.meter import compiled

# A loop as TPU text has it: nothing says how often it turns. The index starts
# at START, grows by STEP, and is compared with LIMIT.
LOOP = """HloModule test, is_scheduled=true, num_partitions=4

%inner.1 (p: s32[]) -> s32[] {
  %p.1 = s32[] parameter(0)
  %one.1 = s32[] constant(STEP)
  ROOT %add.1 = s32[] add(%p.1, %one.1)
}

%body.1 (state.1: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %state.1 = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}, s32[]) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %copy.1 = s32[]{:T(128)} copy(%i.1)
  %next.1 = s32[]{:T(128)} fusion(%copy.1), kind=kLoop, calls=%inner.1
  %x.1 = f32[8]{0:T(128)S(1)} get-tuple-element(%state.1), index=1
  %y.1 = f32[8]{0:T(128)S(1)} negate(%x.1), metadata={op_name="a/while/neg"}
  %n.1 = s32[] get-tuple-element(%state.1), index=2
  ROOT %t.1 = (s32[]{:T(128)}, f32[8]{0}, s32[]) tuple(%next.1, %y.1, %n.1)
}

%condition.1 (state.2: (s32[], f32[8], s32[])) -> pred[] {
  %state.2 = (s32[]{:T(128)}, f32[8]{0}, s32[]) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%state.2), index=0
  %limit.2 = s32[] LIMIT
  ROOT %compare.2 = pred[] compare(SIDES), direction=WAY
}

ENTRY %main.1 (x.3: f32[8], n.3: s32[]) -> f32[8] {
  %x.3 = f32[8]{0} parameter(0)
  %n.3 = s32[] parameter(1)
  %start.3 = s32[] constant(START)
  %ten.3 = s32[] constant(10)
  %init.3 = (s32[], f32[8]{0}, s32[]) tuple(%start.3, %x.3, %CARRIED.3)
  %loop.3 = (s32[], f32[8]{0}, /*index=2*/s32[]) while(%init.3), \
condition=%condition.1, body=%body.1KNOWN
  ROOT %out.3 = f32[8]{0} get-tuple-element(%loop.3), index=1
}
"""
DEFAULT = dict(
  START='0',
  STEP='1',
  LIMIT='constant(7)',
  SIDES='%i.2, %limit.2',
  WAY='LT',
  CARRIED='n',
  KNOWN='',
)


def program(**changes):
  text = LOOP
  for name, value in (DEFAULT | changes).items():
    text = text.replace(name, value)
  return compiled.CompiledProgram(text)


def trips(p):
  return p.trips(p.computations['main.1']['loop.3'])


carried = 'get-tuple-element(%state.2), index=2'


@pytest.mark.parametrize(
  'changes, expected',
  [
    ({}, 7),
    (dict(WAY='LE'), 8),
    (dict(WAY='NE'), 7),
    (dict(START='3'), 4),
    (dict(START='9'), 0),
    (dict(STEP='2'), 4),
    (dict(SIDES='%limit.2, %i.2', WAY='GT'), 7),
    (dict(START='12', STEP='-1', WAY='GT'), 5),
    (dict(START='12', STEP='-2', WAY='GE'), 3),
    (dict(LIMIT=carried, CARRIED='ten'), 10),
    (dict(KNOWN=', backend_config={"known_trip_count":{"n":"42"}}'), 42),
    (dict(LIMIT=carried), None),  # the limit is an argument of the program
    (dict(STEP='0'), None),
    (dict(WAY='EQ'), None),
  ],
)
def test_trips(changes, expected):
  assert trips(program(**changes)) == expected


def test_runs_multiply_loops():
  runs = program(STEP='2').runs(len)
  times = {r.instruction.name: r.times for r in runs}
  assert times['y.1'] == 4 and times['start.3'] == 1
  inside = [r for r in runs if r.instruction.name == 'add.1']
  assert [(r.times, r.fused) for r in inside] == [(4, True)]


def test_a_loop_without_count_is_an_error_if_it_weighs():
  unknown = program(LIMIT=carried)
  with pytest.raises(ValueError, match='loop.3 .*depends on data'):
    unknown.runs(len)
  assert unknown.runs(lambda runs: 0)  # nothing of interest in it


def test_instruction_parts():
  p = program()
  assert (p.entry, p.partitions) == ('main.1', 4)
  y = p.computations['body.1']['y.1']
  assert (y.opcode, y.operands, y.where) == ('negate', ['x.1'], 'a/while/neg')
  assert y.results == [compiled.Array('f32', (8,), 1)]
  loop = p.computations['main.1']['loop.3']
  assert [a.bytes for a in loop.results] == [4, 32, 4]
  with pytest.raises(ValueError, match='no ENTRY'):
    compiled.CompiledProgram('module @jit_f {}')


@pytest.mark.parametrize(
  'text, expected',
  [
    ('f32[2,3]{1,0}', [24]),
    ('(bf16[4]{0:T(8,128)(2,1)}, (s32[], pred[5]{0}))', [8, 4, 5]),
    ('s4[3]{0}', [2]),
    ('f8e4m3fn[16]', [16]),
    ('c64[2]', [16]),
    ('f32[<=7]{0}', [28]),
    ('token[]', [0]),
  ],
)
def test_array_bytes(text, expected):
  assert [a.bytes for a in compiled.arrays(text)] == expected


def test_the_larger_branch_of_a_conditional_counts():
  """One branch negates 8 numbers, the other 1,000."""

  def f(x, y):
    return jax.lax.cond(
      x.sum() > 0, lambda: (-x).sum(), lambda: jnp.sin(y).sum()
    )

  text = jax.jit(f).lower(jnp.ones(8), jnp.ones(1000)).compile().as_text()
  p = compiled.CompiledProgram(text)
  sines = lambda runs: sum(r.instruction.opcode == 'sine' for r in runs)
  negations = lambda runs: sum(r.instruction.opcode == 'negate' for r in runs)
  assert 'conditional(' in text
  assert sines(p.runs(sines)) > 0 == negations(p.runs(sines))
  assert negations(p.runs(negations)) > 0 == sines(p.runs(negations))
