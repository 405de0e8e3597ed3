"""Bytes to and from memory, of texts with known answers and real programs."""

import jax
import jax.numpy as jnp
import pytest

from paraxis.sharding.meter import traffic

HEAD = """HloModule m, num_partitions=1

%slice.1 (w: f32[6,100], i: s32[]) -> f32[100] {
  %w = f32[6,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %c = f32[6,100]{1,0} copy(%w)
  %d = f32[1,100]{1,0} dynamic-slice(%c, %i, %i), dynamic_slice_sizes={1,100}
  ROOT %r = f32[100]{0} bitcast(%d)
}

%update.1 (w: f32[6,100], u: f32[1,100], i: s32[]) -> f32[6,100] {
  %w.1 = f32[6,100]{1,0} parameter(0)
  %u.1 = f32[1,100]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  ROOT %r.1 = f32[6,100]{1,0} dynamic-update-slice(%w.1, %u.1, %i.1, %i.1)
}

%outer.1 (w: f32[6,100], i: s32[]) -> f32[100] {
  %w.2 = f32[6,100]{1,0} parameter(0)
  %i.2 = s32[] parameter(1)
  ROOT %f.2 = f32[100]{0} fusion(%w.2, %i.2), kind=kLoop, calls=%slice.1
}

%whole.1 (w: f32[6,100], i: s32[]) -> f32[100] {
  %w.3 = f32[6,100]{1,0} parameter(0)
  %i.3 = s32[] parameter(1)
  %d.3 = f32[1,100]{1,0} dynamic-slice(%w.3, %i.3, %i.3)
  %all.3 = f32[6,100]{1,0} negate(%w.3)
  ROOT %r.3 = f32[100]{0} bitcast(%d.3)
}

ENTRY %main (w: f32[6,100], u: f32[1,100], i: s32[]) -> f32[6,100] {
  %w.9 = f32[6,100]{1,0} parameter(0)
  %u.9 = f32[1,100]{1,0} parameter(1)
  %i.9 = s32[] parameter(2)
  %v.9 = f32[6,100]{1,0:S(1)} parameter(3)
"""


@pytest.mark.parametrize(
  'line, expected',
  [
    ('f32[6,100]{1,0} negate(%w.9)', 4800),
    ('f32[6,100]{1,0:S(1)} negate(%w.9)', 2400),  # stays on the chip
    ('f32[6,100]{1,0} negate(%v.9)', 2400),
    ('f32[600]{0} bitcast(%w.9)', 0),
    ('(f32[6,100]{1,0}, s32[]) tuple(%w.9, %i.9)', 0),
    ('f32[1,100]{1,0} dynamic-slice(%w.9, %i.9, %i.9)', 800),
    ('f32[6,100]{1,0} dynamic-update-slice(%w.9, %u.9, %i.9, %i.9)', 800),
    ('f32[100]{0} fusion(%w.9, %i.9), calls=%slice.1', 804),
    ('f32[100]{0} fusion(%w.9, %i.9), calls=%outer.1', 804),
    ('f32[100]{0} fusion(%v.9, %i.9), calls=%slice.1', 404),
    ('f32[100]{0} fusion(%w.9, %i.9), calls=%whole.1', 2804),
    ('f32[6,100]{1,0} fusion(%w.9, %u.9, %i.9), calls=%update.1', 804),
    (
      '(f32[6,100]{1,0:S(1)}, f32[6,100]{1,0}, u32[]) copy-start(%w.9)',
      2400,
    ),
    ('f32[6,100]{1,0} copy-done(%v.9)', 2400),
    ('f32[6,100]{1,0} scatter(%w.9, %i.9, %u.9), to_apply=%slice.1', 1200),
  ],
)
def test_single_lines(line, expected):
  assert traffic.hbm_bytes(f'{HEAD}  ROOT %y.9 = {line}\n}}\n') == expected


def text_of(f, *args):
  return jax.jit(f).lower(*args).compile().as_text()


def test_a_product_reads_and_writes_its_arrays():
  a, b = jnp.ones((64, 256)), jnp.ones((256, 128))
  found = traffic.hbm_bytes(text_of(jnp.dot, a, b))
  assert found == 4 * (64 * 256 + 256 * 128 + 64 * 128)


def test_a_scan_reads_each_layer_once():
  """Not the whole stack in every turn, which would be 40 times as much."""
  w, x = jnp.ones((40, 64, 64)), jnp.ones((8, 64))
  f = lambda w, x: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]
  found = traffic.hbm_bytes(text_of(f, w, x))
  assert w.nbytes <= found <= 4 * w.nbytes


def test_a_loop_over_data_is_an_error():
  f = lambda n, x: jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(x), x)
  with pytest.raises(ValueError, match='depends on data'):
    traffic.hbm_bytes(text_of(f, 3, jnp.ones(8)))
