"""Families of models on the same text, and claims about what they learn.

A family is what a few fields of the configuration say: a pattern of layers
(models/layer.py), a tokenizer. All else is shared: width, depth, optimizer,
batches. Held-out loss is reported in bits per byte and drawn beside the
training losses. The number of parameters differs between families.
"""

import itertools

import jax

from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.plot import figures
from paraxis.train.plot import losses as plot
from paraxis.train.run import metrics
from paraxis.train.run import workdir as workdir_lib

PICTURE = 'families.png'


def train(configs, workdir, say=print):
  """{family: held-out bits per byte} of finished trainings, drawn.

  Args:
    configs: {name: schema.Config}, on the first device.
    workdir: folder; each training has a folder of its own in it, and is
      resumed where it stopped. say: prints one line.

  Raises:
    SystemExit: with 75, a signal stopped it.
  """
  found, rows = {}, {}
  for name, config in configs.items():
    folder = workdir_lib.resolve(workdir) / name.replace(' ', '_')
    say(f'training {name}')
    devices = jax.devices()[:1]
    result = claims.finish(config, folder, say, devices=devices)
    found[name] = result.bits_per_byte
    rows[name] = metrics.read(folder)
    say(f'{name}: {found[name]:.4f} held-out bits per byte')
  say(f'wrote {_draw(found, rows, workdir_lib.resolve(workdir) / PICTURE)}')
  return found


def _draw(found, rows, path):
  """Smoothed losses of all families, and held-out bits per byte as bars."""
  fig = figures.make(9.5, 3.8)
  loss, bars = fig.subplots(1, 2, width_ratios=(3, 2))
  colours = dict(zip(found, itertools.cycle(figures.COLOURS), strict=False))
  for name, row in rows.items():
    steps, values = plot.curve(row, 'train/loss')
    loss.plot(steps, plot.smooth(values), color=colours[name], label=name)
  order = sorted(found, key=lambda name: found[name], reverse=True)
  drawn = bars.barh(
    order,
    [found[name] for name in order],
    color=[colours[name] for name in order],
  )
  bars.bar_label(drawn, fmt='%.3f', padding=3)
  bars.set_xlim(0, 1.2 * max(found.values()))
  bars.set_xlabel('held-out text (bits per byte)')
  loss.set_xlabel('step')
  loss.set_ylabel('training loss (nats per token)')
  loss.legend(frameon=False)
  figures.tidy(loss)
  bars.spines[['top', 'right']].set_visible(False)
  return figures.save(fig, path)


def learn(run, *, families, fields, at_most, better):
  """LEARN: held-out bits per byte of each family after the same training.

  Args:
    families: {name: {'section.field': value}}. fields: likewise, of all.
    at_most: {name: bits per byte}.
    better: list of [name, name, by]: the first has at least so many fewer.
  """
  configs = {
    n: experiment.fields(run.config, fields, f) for n, f in families.items()
  }
  found = train(configs, run.workdir, run.say)
  read = [
    f'{c.train.steps * c.train.batch_size * c.data.sequence_length:,}'
    for c in configs.values()
  ]
  text = read[0] if len(set(read)) == 1 else ', '.join(read)
  best_first = sorted(found, key=lambda name: found[name])
  return claims.Outcome(
    '; '.join(
      ['<= ' + ' '.join(f'{at_most[n]:.2f}' for n in families)]
      + [f'{a} below {b} by {by:g}' for a, b, by in better]
    ),
    experiment.numbers([found[n] for n in families], '.3f'),
    f'bits per byte of held-out text after {text} tokens, one seed '
    f'({run.config.train.seed}), best first: '
    + ', '.join(f'{n} {found[n]:.4f}' for n in best_first),
    all(found[n] <= at_most[n] for n in families)
    and all(found[b] - found[a] >= by for a, b, by in better),
  )
