"""Small pictures to classes: a claim about families of models that tell digits.

A picture is a row of one digit (on_frames.Digits): 3 x 5 dots, moved, stretched
and noisy, read column by column, where each column sees all others. Features at
the first place say which digit it is.
"""

import jax.numpy as jnp
import numpy as np

from paraxis.models import decoder
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import on_frames


class Reader:
  """A decoder of columns, as on_frames.learned trains one."""

  def __init__(self, config, task):
    reads = {
      'model.visibility': 'full', 'model.features': task.numbers,
      'model.vocab_size': on_frames.FIRST + task.classes,
    }  # fmt: skip
    self._model = decoder.Decoder(experiment.fields(config, reads).model)
    self.init = self._model.init

  def _logits(self, params, frames_BSC):
    ids = jnp.full(frames_BSC.shape[:2], on_frames.FRAME, jnp.int32)
    x_BSD = on_frames.features(self._model, params, ids, frames_BSC)
    return self._model.logits(params, x_BSD[:, :1])

  def loss(self, params, frames, ids, count, key):
    """() nats a picture."""
    del count, key
    z_B1V = self._logits(params, frames)
    return on_frames.nats(z_B1V, ids, jnp.ones(ids.shape, bool))

  def answers(self, params, frames):
    """ids (B, 1)."""
    return self._logits(params, frames).argmax(-1)


def learn(run, *, families, fields, seeds, rows, within):
  """LEARN: families tell new pictures apart as well as others.

  Args:
    families: {name: {'section.field': value}}. fields: likewise, of all.
    seeds: of the trainings. rows: new pictures.
    within: list of [name, name, by]: the first has at most so much more, as a
      share of all pictures, that it takes for another digit.
  """
  task = on_frames.Digits(least=1, most=1)
  configs = {
    n: experiment.fields(run.config, fields, f) for n, f in families.items()
  }

  def finish(config, folder, say):
    del folder
    return on_frames.learned(Reader, config, task, rows, say)

  home = run.other(run.config, 'pictures')  # names are those on text, too
  trainings = ablation.trained(home, configs, seeds, finish, {'rows': rows})
  found = ablation.numbers(trainings, 'error')
  seconds = ablation.cpu_seconds(trainings)
  findings = [
    ablation.at_most(
      f'{a} above {b}', np.subtract(found[a], found[b]), by, seconds
    )
    for a, b, by in within
  ]
  what = 'share of pictures taken for another digit'
  caveat = f'of {rows} new ones, after {len(seeds)} trainings each'
  return ablation.outcome(run, found, findings, what, caveat, seconds)
