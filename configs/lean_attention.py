"""LeanAttention: one token attends to long rows, shared evenly by workers

paper: arXiv:2405.10480
mechanism: pallas_kernels/decode_attention/schedule.py,
  pallas_kernels/decode_attention/tpu.py, pallas_kernels/decode_attention/gpu.py
test: tests/pallas_kernels/decode_attention/test_schedule.py,
  tests/pallas_kernels/decode_attention/test_kernels.py,
  tests/train/claims/attention/test_decode.py
run: paraxis reproduce lean_attention
cost: 20 CPU-seconds
expect: EQ 1e-15 for 1 to 33 workers and rows of 0 to 512 slots, 2e-15 for a
  shared prefix; SIM shares differ by one tile at most; over batches of random
  lengths, direction only, a task a row takes 2.86 times as long (the paper:
  2.6), a fixed split 1.80 (1.73), if a part costs half a tile; at 0, 1, 2, 4
  tiles 3.19, 2.65, 2.37, 2.06 and 2.01, 1.67, 1.50, 1.31. One row of 512k: 8.19
  (8.33). AOT 0.8 to 1.3% of the cache in temporaries on four TPUs (bound 2%,
  ours), which needs libtpu.
partial: rows that share a prefix are in claims only; ragged rows decode so.
differs: work is counted in tiles on 264 workers, twice the processors of an
  H100, no time is measured; the cost of a part is assumed: from 2 tiles on the
  paper's 2.6 is not reached, from 1 on its 1.73. All 35 cases, with equal rows
  and one long row, are 3.93 on average; a fixed split is up to 1.2 times as
  fast where one row is short (0.83). Parts are merged after the kernel, by
  rows, not by the worker that began a row. A TPU has one or two cores to a
  device: there the same schedule serves ragged rows in one program.
"""

from paraxis.configs import schema


def get_config():
  """A small decoder with four query heads to a kv head."""
  config = schema.default()
  config.model.update(d_model=256, d_ff=688, num_heads=8, num_kv_heads=2)
  config.data.sequence_length = 1024
  return config


def claims():
  """What `paraxis reproduce lean_attention` checks."""
  from paraxis.train.claims.attention import decode

  division = dict(
    check=decode.any_division,
    lengths=[0, 1, 5, 63, 64, 65, 129, 256, 511, 512], tile=64,
    workers=[1, 2, 5, 33], within=1e-12,
  )  # fmt: skip
  prefix = dict(
    check=decode.shared_prefix,
    prefix=200,
    lengths=[0, 1, 64, 129],
    within=1e-12,
  )
  balance = dict(
    check=decode.balance, draws=200, rows=16, longest=8192, tile=64,
    workers=[1, 2, 7, 33, 132],
  )  # fmt: skip
  times = lambda against, **published: dict(
    check=decode.makespans, against=against, above=1, published=published,
    sizes=[[2**n, rows] for n in (12, 14, 16, 18, 19) for rows in (1, 4, 16)],
    machine=dict(heads=32, tile=256, workers=264),
    part=0.5, swept=[0, 0.25, 1, 2, 4],
  )  # fmt: skip
  machines = dict(
    check=decode.compiled,
    topologies=['v5e:1x1', 'v5p:1x1x1', 'v6e:1x1', 'tpu7x:1x1x1'],
    rows=4, slots=4096, within=0.02,
  )  # fmt: skip
  return [
    ('pieces of any division, merged', 'EQ', division, None),
    ('a prefix read once for all rows', 'EQ', prefix, None),
    ('tiles of the busiest less the idlest', 'SIM', balance, None),
    ('makespan of a task a row', 'SIM', times('row', above=2.6), '2.6'),
    ('makespan of a fixed split', 'SIM', times('fixed', above=1.73), '1.73'),
    ('a cache is read in place on TPUs', 'AOT', machines, None),
  ]


def knockouts():
  """An even division that cuts no row; parts without their lse; no kernel."""
  from paraxis.train.claims.attention import decode
  from paraxis.train.claims.attention import parts

  whole, one = decode.whole_rows, {'topologies': ['v5e:1x1']}
  prefix = 'a prefix read once for all rows'
  return [
    ('lse_of_pieces', 'pieces of any division, merged', decode.equal_weights),
    ('lse_of_a_prefix', prefix, parts.mean_of_parts),
    ('shares_whole', 'tiles of the busiest less the idlest', whole),
    ('rows_whole', 'makespan of a task a row', whole),
    ('rows_whole_fixed', 'makespan of a fixed split', whole),
    ('kernel', 'a cache is read in place on TPUs', decode.no_kernel, one),
  ]
