"""What tests of pipeline schedules share: which there are, one wrong entry."""

import itertools

from paraxis.sharding.pipeline import schedules

# Fields of tables.Rows that are slots -> the buffer that they index.
BUFFERS = {
  'f_slot': 'inputs', 'b_slot': 'inputs', 'f_receive': 'inputs',
  'b_cotangent': 'cotangents', 'b_receive': 'cotangents',
  'loss_slot': 'cotangents', 'b_store': 'stores', 'w_slot': 'stores',
}  # fmt: skip


def admissible(stages, microbatches):
  """Yields arguments of schedules.make for all schedules that fit."""
  for name, p, m in itertools.product(schedules.NAMES, stages, microbatches):
    for v in (1, 2, 3):
      fewest, most = schedules.CHUNKS[name]
      grouped = v > 1 and name != 'v_half'
      if fewest <= v <= (most or v) and not (grouped and m % p):
        yield name, p, m, v


def changed(tables, field, at):
  """A field of tables.Rows with one entry wrong, but within range."""
  x = getattr(tables.rows, field).copy()
  if field in BUFFERS:
    # Another row, the trash if there is one only: F leaves its x there too.
    n = getattr(tables, BUFFERS[field])
    x[at] = n if n == 1 else (x[at] + 1) % n
  elif x.dtype == bool:
    x[at] = not x[at]
  elif x.min() < 0:  # a microbatch, or -1
    x[at] = -1
  elif field == 'loss_device':
    x[at] = (x[at] + 1) % tables.rows.f_on.shape[1]
  else:  # a microbatch, or a chunk
    x[at] = (x[at] + 1) % (x.max() + 1)
  return x
