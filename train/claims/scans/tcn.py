"""Claims about dilated convolutions and attention in chunks (TCNCA).

Equalities are in float64. What a token costs is counted in the traced program
(sharding/meter/flops.py), which walks whole blocks of attention, and the taps,
which are no matrix product, by formula. What is learned is reported as
held-out bits per byte of small models that differ in the reach of their
convolutions alone.

Legend: B rows, T tokens, D model.
"""

import dataclasses
import functools
import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models import batch as batch_lib
from paraxis.models import decoder
from paraxis.models.mixers import recurrence
from paraxis.models.mixers import tcn
from paraxis.sharding.meter import flops
from paraxis.train.certify import check
from paraxis.train.certify import verify
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.plot import losses as plot

VOCABULARY = 64
TINY = {
  'model.vocab_size': VOCABULARY, 'model.d_model': 16, 'model.num_heads': 8,
  'model.d_ff': 16, 'model.num_layers': 2, 'model.pattern': 'C',
  'model.attention_block': 16, 'model.dtype': 'float64',
  'model.param_dtype': 'float64', 'model.tcn.kernel': 3, 'model.tcn.depth': 2,
  'model.tcn.key_dim': 4, 'model.tcn.value_expand': 1.0,
}  # fmt: skip


def _tiny(*changes):
  return experiment.fields(schema.Config(), TINY, *changes)


def _tcn(own):
  """{'section.field': value} of fields of mixer_schema.Tcn."""
  return experiment.under('model.tcn', own)


def _random(*changes):
  """(Decoder, random parameters) of TINY with fields changed."""
  model = decoder.Decoder(_tiny(*changes).model)
  taps = lambda path, x: abs(0.5 + x) if 'taps' in path else x
  params = experiment.random_parameters(model)
  return model, {path: taps(path, x) for path, x in params.items()}


def _reached(own, length, at):
  """(first, last) token of a row whose numbers change with those of one."""
  alone = {'model.num_layers': 1, 'model.mlp': 'none', 'model.tcn.chunk': 1}
  model, params = _random(_tcn(own), alone)
  rows = experiment.documents(1, length, VOCABULARY)
  see = model.visibility(rows)
  run = jax.jit(lambda x: model.run(model.pattern, params, x, see)[0])
  x: jax.Array = model.embed(params, rows)
  change = run(x.at[0, at].multiply(1.5)) - run(x)
  seen = np.flatnonzero(np.asarray(jnp.abs(change).max(-1))[0])
  return int(seen[0]), int(seen[-1])


def field_is_the_formula(run, *, cases):
  """EQ: tokens that one token reaches are 1 + (W - 1) sum of dilations.

  Args:
    cases: list of fields of mixer_schema.Tcn: kernel, dilation, depth. Chunks
      are of one token, so that nothing else reaches on.
  """
  want, found, counted = [], [], []
  with jax.enable_x64(True):
    for case in cases:
      own = mixer_schema.Tcn(**case)
      far = [own.dilation**i for i in range(own.depth)]
      want.append(1 + (own.kernel - 1) * sum(far))
      first, last = _reached(case, want[-1] + 10, 5)
      found.append(last - 4 if first == 5 else first - 5)
      counted.append(tcn.receptive_field(own))
  texts = [' '.join(f'{k} {v}' for k, v in case.items()) for case in cases]
  return claims.Outcome(
    experiment.numbers(want),
    experiment.numbers(found),
    f'tokens from the one that is changed to the last that differs at all, '
    f'float64, random weights; {", ".join(texts)}',
    want == found == counted,
  )


def no_dilation():
  """Knock-out: convolutions of neighbours, however many."""
  near = lambda own: [1] * own.depth
  return knockouts.patched(tcn, 'dilations', near)


def no_tails():
  """Knock-out: a convolution forgets the inputs before a row."""
  real = recurrence.conv

  def forgets(*given):
    y, tail = real(*given)
    return y, jnp.zeros_like(tail)

  return knockouts.patched(recurrence, 'conv', forgets)


def shards_apart():
  """Knock-out: every shard counts chunks from its own first token."""
  real = tcn.chunks
  alone = lambda *given: real(*given[:3])
  return knockouts.patched(tcn, 'chunks', alone)


def streams_as_a_whole(run, *, own, length, prompts, within):
  """EQ: a prefill and steps that keep tails and a chunk equal one pass.

  Args:
    own: fields of mixer_schema.Tcn.
    prompts: tokens that a prefill reads, in each case.
  """
  found, sizes = {}, set()
  with jax.enable_x64(True):
    model, params = _random(_tcn(own))
    rows = experiment.documents(2, length, VOCABULARY)
    loose = model.unstack(params)
    want = jax.jit(lambda p: model.features(p, rows)[0])(params)
    for first in prompts:
      steps = functools.partial(experiment.stepped, model, first=first)
      found[first] = experiment.gap(jax.jit(steps)(loose, rows), want)
    for slots in (length, 16 * length):
      cache = jax.eval_shape(lambda s=slots: model.init_cache(1, s)).states
      sizes.add(sum(x.size for x in jax.tree.leaves(cache)))
  return experiment.equal(
    found,
    within,
    f'{length} tokens, float64, tokens in a prefill: '
    f'{experiment.listed(found)}; the state holds '
    f'{" or ".join(map(str, sizes))} numbers a row, whatever the length',
    len(sizes) == 1,
  )


def chunks_over_shards(run, *, mesh, length, chunks, within):
  """EQ: loss and gradients, chunks longer than a shard's part of the row.

  Args:
    mesh: axis -> size. chunks: tokens of a chunk.
  """
  found = {}
  for chunk in chunks:
    config = _tiny(
      {f'mesh.{axis}': size for axis, size in mesh.items()},
      {'data.sequence_length': length, 'model.tcn.chunk': chunk},
      {'optimizer.warmup_steps': 0, 'train.batch_size': 8},
    )
    subject = verify.Case(config, jax.devices(), True, ())
    rows = verify.certify(subject, ('loss', 'gradients'))
    found[chunk] = np.max([row.measured for row in rows])
  return experiment.equal(
    found,
    within,
    f'{mesh}, packed rows of {length}, {length // mesh["context"]} tokens a '
    f'shard, float64; chunks of {experiment.listed(found)}',
  )


def _products(model, length):
  """Floating-point operations of a forward pass for one token, counted."""
  made = decoder.Decoder(model)
  shape = jax.ShapeDtypeStruct((1, length), jnp.int32)
  rows = batch_lib.Batch(shape, None, shape, shape, None, None)
  params = jax.eval_shape(made.init, jax.random.key(0))
  run = lambda p, rows: made.features(p, rows)[0]
  return flops.count(run, params, rows).total / length


def cost_of_a_token(run, *, lengths):
  """SIM: operations of a token more are as many in rows of any length.

  With causal attention over the whole row they are more and more.

  Args:
    lengths: three, rising.
  """
  grows, costs = {}, []
  for kind, name in (('C', 'in chunks'), ('F', 'over the row')):
    model = dataclasses.replace(run.config.model, pattern=kind)
    row = [_products(model, t) for t in lengths]
    whole = np.multiply(row, lengths)
    more = np.diff(whole) / np.diff(lengths)  # of a token, between two lengths
    grows[name] = more[-1] / more[0]
    thousands = experiment.numbers([x / 1e3 for x in row], ',.0f')
    costs.append(f'{name} {thousands} ({row[-1] / row[0]:.2f} times)')
  own = run.config.model.tcn
  taps = 2 * own.kernel * own.depth * run.config.model.d_model
  return claims.Outcome(
    '1, and above',
    experiment.numbers(grows.values(), '.4g'),
    'growth of what a token more costs, the last over the first; thousands '
    f'a token of a row, T = '
    f'{experiment.numbers(lengths)}: {"; ".join(costs)}. Besides, '
    f'{taps * run.config.model.num_layers / 1e3:,.0f} of taps',
    math.isclose(grows['in chunks'], 1) and grows['over the row'] > 1.01,
  )


def bits_by_reach(run, *, variants, seeds, pair, apart, verdict):
  """LEARN: held-out bits per byte of text by the reach of convolutions.

  Args:
    variants: {name: fields of mixer_schema.Tcn that differ}.
    seeds: of the trainings.
    pair: two of the names; the second has more bits, by more than `apart`.
    verdict: what it means for the paper if that holds: 'reproduced' at best, or
      'opposite'.
  """
  configs = {
    n: experiment.fields(run.config, _tcn(f)) for n, f in variants.items()
  }
  trainings = ablation.trained(run, configs, seeds)
  found = ablation.numbers(trainings, 'bits_per_byte')
  seconds = ablation.cpu_seconds(trainings)
  folders = [t.folder for row in trainings.values() for t in row]
  run.say(f'wrote {plot.draw(folders, run.results / plot.NAME)}')
  sizes = [
    f'{name} (reach {tcn.receptive_field(c.model.tcn)}), '
    f'{check.parameters(c):,} parameters'
    for name, c in configs.items()
  ]
  out = ablation.outcome(
    run,
    found,
    [ablation.less(found, pair[0], pair[1], apart, seconds)],
    'bits per byte',
    f'{run.config.train.steps} steps, chunks of {run.config.model.tcn.chunk}: '
    f'{"; ".join(sizes)}',
    seconds,
  )
  if not out.passed or verdict == claims.VERDICTS[0]:
    return out
  enough = out.seeds >= claims.ENOUGH_SEEDS
  return out._replace(verdict=verdict if enough else claims.VERDICTS[2])


def repeated(path, period, symbols, documents, length):
  """Writes documents that are a random word, over and over, if the file holds
  other text."""
  rng, letters = np.random.default_rng(0), [chr(97 + i) for i in range(symbols)]
  word = lambda: ''.join(rng.choice(letters, period))
  lines = [
    json.dumps(dict(text=(word() * length)[:length], domain='repeated'))
    for _ in range(documents)
  ]
  made = '\n'.join(lines)
  if path.exists() and path.read_text('utf-8') == made:
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'{path.name}.tmp')
  temporary.write_text(made, 'utf-8')
  os.replace(temporary, path)


def repetition_in_reach(
  run, *, text, model, steps, variants, seeds, pair, apart
):
  """LEARN: bits a byte of random words that repeat, in reach or out of it.

  Args:
    text: {'period', 'symbols', 'documents'}; a document fills a row.
    model: {'section.field': value} that differs. steps: of training.
    variants, seeds, pair, apart: as for `bits_by_reach`; it is what the paper
      says.
  """
  path = run.results / 'repeated.jsonl'
  length = run.config.data.sequence_length - 1
  repeated(path, length=length, **text)
  config = experiment.fields(
    run.config, model, {'data.path': str(path), 'train.steps': steps}
  )
  found = bits_by_reach(
    run.other(config), variants=variants, seeds=seeds, pair=pair, apart=apart,
    verdict=claims.VERDICTS[0],
  )  # fmt: skip
  bits, p = np.log2(text['symbols']), text['period']
  return found._replace(
    caveat=f'words of {p} of {text["symbols"]} letters, over and over; '
    f'{bits:g} bits a letter, {bits * p / length:.2f} if what repeats is free; '
    + found.caveat
  )
