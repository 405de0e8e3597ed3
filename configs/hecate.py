"""Hecate: the busiest experts are gathered, so that no device waits for theirs

paper: arXiv:2502.02581
mechanism: sharding/experts/dispatch.py, models/ffn/moe.py
test: tests/train/claims/experts/test_layer.py
run: paraxis reproduce hecate
cost: 180 CPU-seconds
expect: EQ 2e-15 for 4 draws of hot experts with one program, those gathered the
  busiest; HLO bytes equal 4 h |expert| (r-1)/r; SIM the busiest of 8 ranks over
  the mean falls with every hot expert, none and 16 of 64: 1.38 -> 1.16, 2.33 ->
  1.11, 3.82 -> 1.05 for loads i^-0.5, i^-1, i^-1.5, direction only (up to 3.63
  x; the paper: up to 3.54 x, of a step); LEARN on loads of trainings of 100
  steps, 3 seeds, 16 experts on 8 ranks, none and 4 hot: 2.06 -> 1.53, 1.34 x
  less +-0.02, direction only.
differs: work of the busiest rank is counted, no time is measured. One set of
  hot experts for all devices of a region, the same number in every layer,
  chosen by the loads of the step before; the paper chooses sets by device, and
  their size by what hides behind attention. Gathered experts are kept for the
  backward pass unless train.remat gathers them again. Owners hold equal shares;
  gathering moves the bytes of an all-reduce, so that above half of the experts
  a gather of all would be cheaper.
"""

from paraxis.configs import presets


def get_config():
  """16 experts on data=2,tensor=4, the two busiest of a layer gathered."""
  config = presets.small_text(d_model=64, d_ff=64, qk_norm='head')
  config.mesh.update(data=2, tensor=4)
  experts = config.model.experts
  experts.update(count=16, top_k=2, hot=2, region='data+tensor', balance=0.001)
  # The hot ones are chosen by the loads of the step before, which a layer does
  # not see where loads are counted over the whole step.
  experts.balance_scope = 'microbatch'
  config.data.sequence_length = 128
  config.optimizer.warmup_steps = 40
  config.train.update(steps=200, batch_size=16)
  return config


def claims():
  """What `paraxis reproduce hecate` checks."""
  from paraxis.train.claims.experts import layer
  from paraxis.train.claims.experts import loads
  from paraxis.train.claims.experts import messages

  mesh = dict(mesh='data=2,tensor=4')
  equal = mesh | dict(check=layer.any_hot_set, hot=2, sets=4, within=1e-9)
  sent = mesh | dict(check=messages.hot_bytes, hots=[0, 1, 2, 4])
  zipf = dict(
    check=loads.zipf_stragglers,
    experts=64, ranks=8, hots=[0, 1, 2, 4, 8, 16], draws=200,
    exponents=[0.5, 1.0, 1.5], falls=1.0, published=dict(falls=3.54),
  )  # fmt: skip
  recorded = dict(
    check=loads.recorded_stragglers,
    seeds=[0, 1, 2], steps=100, ranks=8, hots=[0, 1, 2, 4], falls=1.0,
    published=dict(falls=3.54),
  )  # fmt: skip
  return [
    ('any hot experts, one program', 'EQ', equal, None),
    ('bytes by hot experts', 'HLO', sent, None),
    ('busiest rank, Zipf loads', 'SIM', zipf, 'up to 3.54 x'),
    ('busiest rank, loads of a training', 'LEARN', recorded, 'up to 3.54 x'),
  ]


def knockouts():
  """The experts with the fewest tokens are gathered, or none, or all."""
  from paraxis.train.claims.experts import loads
  from paraxis.train.claims.experts import messages

  names = 'any hot experts, one program', 'busiest rank, Zipf loads'
  trained = 'busiest rank, loads of a training'
  return [
    ('coldest_gathered', names[0], loads.coldest),
    ('few_gathered', 'bytes by hot experts', messages.all_gathered),
    ('coldest', names[1], loads.coldest),
    ('none_hot', trained, {'hots': [0, 0], 'seeds': [0]}),
  ]
