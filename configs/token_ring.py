"""TokenRing: queries travel the ring, results return directly

paper: arXiv:2412.20501
mechanism: sharding/sequence/forms.py, sharding/sequence/attention.py
test: tests/sharding/sequence/test_attention.py,
  tests/train/claims/layouts/test_context.py
run: paraxis reproduce token_ring
cost: 30 CPU-seconds
expect: EQ 1e-15; HLO 21 + 35 permutes against the ring's 14 + 30, with the
  bytes of the formulas; 0.83 of the ring's bytes with as many kv heads as query
  heads (1.03 forward, 0.73 backward, where dk and dv need not travel), 3.26 at
  4 query heads per kv head, even at 1.21.
differs: the paper gives times on fully connected GPUs, where the gain is on the
  busiest link: 0.55 of the ring's bytes. On a ring of links every result
  crosses all links in between: 1.25 times the ring's bytes times links. Heads
  of 16 numbers; the wider, the nearer to 0.80 and 3.18. All of q is sent, also
  in the causal steps that need half of it. The backward pass is ours: k and v
  stay, q travels with do, and dq returns to its rank.
"""

from paraxis.configs import presets

# Of one attention: 8 ranks of 8 tokens, heads of 16 numbers.
SHAPE = dict(ranks=8, tokens=8, heads=8, width=16)


def get_config():
  """A small model on context=8."""
  config = presets.tiny(num_kv_heads=2)
  config.mesh.update(context=8, context_form='token_ring')
  return config


def claims():
  """What `paraxis reproduce token_ring` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.layouts import context

  equal = experiment.on_layouts('context=8')
  sent = lambda form: dict(
    check=context.sends_equal_formulas,
    form=form,
    shape=dict(SHAPE, kv_heads=8),
  )
  against = dict(
    check=context.bytes_against_ring,
    form='token_ring',
    shape=SHAPE,
    groups=[1, 4],
  )
  return [
    ('loss and all gradients equal one device', 'EQ', equal, None),
    ('TokenRing by direction', 'HLO', sent('token_ring'), None),
    ('the KV ring by direction', 'HLO', sent('ring'), None),
    ('bytes against the KV ring', 'HLO', against, None),
  ]


def knockouts():
  """The ring of k and v under TokenRing's name; no ring."""
  from paraxis.train.claims.layouts import context

  return [
    ('moving_queries', 'TokenRing by direction', context.kv_ring),
    ('no_ring', 'the KV ring by direction', context.no_ring),
    ('direct_results', 'bytes against the KV ring', context.kv_ring),
  ]
