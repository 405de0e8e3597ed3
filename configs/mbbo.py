"""BSVRB: many minimisers under one minimum, read by blocks and by samples

paper: arXiv:2305.18730
mechanism: train/steps/bilevel.py
test: tests/train/steps/test_bilevel.py,
  tests/train/claims/outer/test_bilevel.py
run: paraxis reproduce mbbo
cost: 120 CPU-seconds
expect: EQ 1e-15; LEARN, steps to .03 by B of 1, 4, 16 fall as B^-.50 (2,713,
  1,236, 675), by I of 4, 8, 16 from 2,053 to 675 and 327.
differs: 16 quadratic blocks of 3 numbers with noise in all of their parts, the
  second algorithm alone. Rates grow with blocks and samples as in the theorem;
  with one sample they do not reach the target (knock-out `alone`). The model
  of this config is not read.
partial: no training has a problem of two levels.
"""

from paraxis.configs import presets


def get_config():
  """The smallest preset: claims bring functions of their own."""
  return presets.tiny()


def claims():
  """What `paraxis reproduce mbbo` checks."""
  from paraxis.train.claims.outer import bilevel

  exact = dict(
    check=bilevel.hypergradient, seeds=[0, 1, 2], steps=100, within=1e-8
  )
  fewer = dict(
    check=bilevel.fewer, blocks=[4, 8, 16], samples=[1, 4, 16],
    seeds=[0, 1, 2], most=5000, to=0.03, power=[-0.5, 0.3], alone=False,
  )  # fmt: skip
  return [
    ('the gradient in closed form', 'EQ', exact, None),
    ('iterations fall with blocks and samples', 'LEARN', fewer, '-1/2'),
  ]


def knockouts():
  """z stays 0; one sample is read, however large the rates."""
  from paraxis.train.claims.outer import bilevel

  exact, fewer = (name for name, *_ in claims())
  return [
    ('without_turning', exact, bilevel.without_turning),
    ('alone', fewer, {'alone': True}),
  ]
