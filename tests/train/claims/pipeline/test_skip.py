"""Claims about skipped stages hold, fail when broken, and train models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train.certify import trial
from paraxis.train.claims import harness as claims
from paraxis.train.claims.pipeline import skip as claims_skip

TRAINING = dict(stages=2, fractions=[0, 0.5], removed=[0, 0.5], paths=2)


def run(**fields):
  """claims.Run of the config, shrunk."""
  config = command_line.load('skippipe')
  config.model.update(dict(num_layers=4) | fields)
  config.pipeline.microbatches = 4
  return claims.Run(schema.view(config), '', say=lambda text: None)


def test_layers_of_paths():
  rows = claims_skip.layers_of([(0, 2), (0, 1)], 3, 6)
  assert rows.tolist() == [[0, 1, 4, 5], [0, 1, 2, 3]]
  with pytest.raises(errors.UserError, match='=8 is not a multiple of 3'):
    claims_skip.layers_of([(0,)], 3, 8)


def test_a_pipeline_equals_layers_on_paths(monkeypatch):
  check = lambda fractions: claims_skip.equals_pipeline(
    run(), mesh='stage=4', fractions=fractions, within=1e-9
  )
  right = check([0, 0.5])
  assert right.passed and 'left out equal to 1F1B bit for bit' in right.caveat
  assert 0 < float(right.measured) < 1e-12
  drawn = claims_skip.training_paths
  turned = lambda config, stages: drawn(config, stages)[::-1]
  monkeypatch.setattr(claims_skip, 'training_paths', turned)
  wrong = check([0.5])  # the right paths, of the wrong microbatches
  assert not wrong.passed and float(wrong.measured) > 1e-3


def test_layers_that_are_left_out_have_no_gradient():
  """And the others those of a plain loop over microbatches and layers."""
  config = run(d_model=16, d_ff=32, num_heads=2, vocab_size=16).config
  config = claims_skip._alone(config)
  config = dataclasses.replace(
    config,
    train=dataclasses.replace(config.train, batch_size=4),
    data=dataclasses.replace(config.data, sequence_length=8),
  )
  side = trial.Runner(config, jax.devices()[:1])
  model = side.job.model
  reference = trial.reference(config, True, jax.devices()[0])
  params, batch = reference.params, reference.batches[0]
  layers = np.array([[0, 3], [0, 1], [3, 0], [1, 3]])
  step = claims_skip.make_step(layers)(side.job.built, side.job.optimizer, 0.0)

  def slowly(params):
    total = 0.0
    for i, row in enumerate(layers):
      parts = [x[i : i + 1] for x in batch[:-1]]
      mine = type(batch)(*parts, batch.denominator)
      x, see = model.embed(params, mine), model.visibility(mine)
      for l in row:
        one = {
          p: v[l : l + 1] for p, v in params.items() if p.startswith('layers/')
        }
        x = model.run(model.pattern[:1], one, x, see)
      z = model.logits(params, model.normalise(params, x))
      picked = jnp.take_along_axis(z, mine.targets[..., None], -1)[..., 0]
      nats = jax.nn.logsumexp(z, -1) - picked
      total += (nats * mine.weights).sum() / batch.denominator
    return total

  with side.job.context():
    put = side.start(params).params
    loss, found = jax.jit(step.grads)(put, side.put(batch))
    wanted = jax.jit(jax.value_and_grad(slowly))(put)
  assert float(loss) == pytest.approx(float(wanted[0]), rel=1e-6)
  assert trial.worst(jax.device_get(found), jax.device_get(wanted[1]))[0] < 1e-5
  for path, g in found.items():
    if path.startswith('layers/'):
      assert not np.any(g[2]) and np.any(g[1]) and np.any(g[3])


def test_paths_are_balanced(monkeypatch):
  check = lambda: claims_skip.balanced(
    run(), stages=8, microbatches=8, fractions=[0.25, 0.5]
  )
  assert check().passed and '50% 8 ' in check().caveat
  make = claims_skip.schedules.make
  late = lambda *args, **options: dataclasses.replace(
    make(*args, **options), paths=((0, 1, 2, 3, 4, 5),) * 8
  )
  monkeypatch.setattr(claims_skip.schedules, 'make', late)
  assert not check().passed


def test_ratios(monkeypatch):
  found = {0: {0: 80.0, 0.5: 160.0}, 0.5: {0: 100.0, 0.5: 110.0}}
  monkeypatch.setattr(claims_skip, '_perplexities', lambda *a, **k: found)
  ask = dict(training=TRAINING, share=0.5)
  robust = lambda trained: claims_skip.robust(
    run(), trained=trained, at_most=1.2, **ask
  )
  assert robust(0.5).passed and robust(0.5).measured == '1.100'
  assert not robust(0).passed and '0% 80.0, 50% 160.0' in robust(0).caveat
  full = lambda at_most: claims_skip.against_full(
    run(), trained=0.5, at_most=at_most, **ask
  )
  assert full(0.7).passed and not full(0.6).passed  # 110 / 160
  assert '1.25 times' in full(0.7).caveat


def test_training(tiny, tmp_path):
  """Two models are trained, asked with all stages and with half, and drawn."""
  config = tiny.config(
    {'pipeline.microbatches': 2, 'train.steps': 2, 'train.batch_size': 4}
  )
  said = []
  outcome = claims_skip.robust(
    claims.Run(config, tmp_path, said.append),
    training=TRAINING, trained=0.5, share=0.5, at_most=10,
  )  # fmt: skip
  assert outcome.passed and 0.5 < float(outcome.measured) < 2
  asked = [line for line in said if line.startswith('trained with')]
  assert len(asked) == 4 and 'asked with 50%' in asked[-1]
  values = [float(line.split()[-1]) for line in asked]
  assert len(set(values)) == 4 and all(100 < v < 400 for v in values)
  assert (tmp_path / claims_skip.PICTURE).exists()
  for name in ('skip0', 'skip50'):
    made = (tmp_path / name / 'config.json').read_text()
    assert '"schedule": "skip"' in made
