"""Claims about experts that are trained alone, each on a domain of its own.

    seed        data parallel on all domains, for a share of the steps
    experts     one a domain, from the seed: what is left, shared out evenly
    dense       data parallel on all domains, for all steps

So a seed and its experts cost the steps of the dense model, and no message
between them. They answer as an ensemble (decode/evaluate/ensemble.py), which
decodes with all of them, or as the average of their parameters
(train/run/merge.py), which costs what one does.

Legend: E experts, N pieces of held-out text (a document, or a row of it), B
rows, T tokens, V vocabulary.
"""

import functools
import json
import math
from typing import Any

import jax
import numpy as np

from paraxis.decode.evaluate import ensemble
from paraxis.sharding.checkpoint import folders
from paraxis.sharding.meter import compiling
from paraxis.train import loop
from paraxis.train import loss as loss_lib
from paraxis.train import program as job_lib
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.data import corpus
from paraxis.train.plot import figures
from paraxis.train.run import merge
from paraxis.train.run import origin
from paraxis.train.run import workdir as workdir_lib

PICTURE, SHARED = 'domains.png', 'branches'
AVERAGE = 'average'  # folder of one, beside its experts
SIZES = dict(E=3, T=24, V=40)  # of `mixtures`


def still():
  """Knock-out: the text so far moves no belief in an expert."""
  believed = lambda prior_E, nats_EBT: prior_E[:, None, None] + 0 * nats_EBT
  return knockouts.patched(ensemble, 'believed', believed)


def unmoved():
  """Knock-out: the unnormalised geometric mean of experts, each to the power of
  its prior: what one that the prior draws, whatever the text, has on average.
  It is no distribution: of an ensemble in which no text moves a belief a token
  has the arithmetic mean."""
  total = lambda prior_E, nats_EN: np.exp(prior_E) @ nats_EN
  return knockouts.patched(ensemble, 'total', total)


# ---------------------------------------------------------------- equations


def _by_bayes(prior_E, z_ETV, targets_T):
  """(T, V) probabilities of the mixture: a plain loop."""
  belief, rows = np.exp(prior_E), []
  for t, token in enumerate(targets_T):
    p_EV = np.exp(z_ETV[:, t] - z_ETV[:, t].max(-1, keepdims=True))
    p_EV /= p_EV.sum(-1, keepdims=True)
    rows.append(belief @ p_EV)
    belief = belief * p_EV[:, token]
    belief /= belief.sum()
  return np.stack(rows)


def _mixture(prior_E, z_ETV, targets_T):
  """(T, V) log-probabilities, by ensemble.py."""
  log_ETV = np.asarray(jax.nn.log_softmax(z_ETV, -1))
  nats_ET = np.take_along_axis(log_ETV, targets_T[None, :, None], -1)[..., 0]
  belief_E1T = ensemble.believed(prior_E, nats_ET[:, None])
  return ensemble.mixed(belief_E1T[:, 0], z_ETV), nats_ET


def mixtures(run, *, within):
  """EQ: an ensemble is Bayes' rule, and one expert where that is all there is.

  In float64: a loop token by token; its product over tokens, as a sum over
  experts of whole texts; equal experts; a prior on one of them. Bitwise: the
  average of copies is the copy, at shares that no float holds.
  """
  del run
  rng, shape = np.random.default_rng(0), tuple(SIZES.values())
  prior = np.array([0.6, 0.3, 0.1])
  with jax.enable_x64(True):
    z_ETV = rng.normal(0, 3, shape)
    targets_T = rng.integers(0, shape[-1], shape[1])
    found, nats_ET = _mixture(np.log(prior), z_ETV, targets_T)
    wanted_TV = np.log(_by_bayes(np.log(prior), z_ETV, targets_T))
    whole = ensemble.total(np.log(prior), nats_ET.sum(-1, keepdims=True))[0]
    by_token = wanted_TV[np.arange(shape[1]), targets_T].sum()
    each = jax.nn.log_softmax(z_ETV, -1)
    same, _ = _mixture(np.log(prior), np.stack([z_ETV[1]] * 3), targets_T)
    with np.errstate(divide='ignore'):
      one, _ = _mixture(np.log([0.0, 1.0, 0.0]), z_ETV, targets_T)
    gaps = {
      'a loop': experiment.gap(found, wanted_TV),
      'whole texts': experiment.gap([whole], [by_token]),
      'equal experts': experiment.gap(same, each[1]),
      'one expert': experiment.gap(one, each[1]),
    }
  x = rng.normal(size=500).astype(np.float32)
  copies = merge.mean([1 / 3] * 3, [x] * 3, x.dtype)
  exact = copies.tobytes() == x.tobytes()
  return experiment.equal(
    gaps, within, f'float64; {experiment.listed(gaps)}; the average of three '
    f'copies is {"the copy, to the bit" if exact else "NOT the copy"}', exact,
  )  # fmt: skip


# ---------------------------------------------------------------- trainings


def _split(path, folder, parts, seed):
  """Writes the documents of data.path into a folder, those for training in so
  many parts at random, of about as many bytes: the names of the parts."""
  names = [f'part{i}' for i in range(parts)]
  found = corpus.documents(path)
  order = np.random.default_rng(seed).permutation(len(found))
  sizes, lines = dict.fromkeys(names, 0), []
  for document in (found[i] for i in order):
    domain, split = document.domain, 'held'
    if not document.held:
      domain, split = min(names, key=sizes.__getitem__), 'train'
      sizes[domain] += document.n_bytes
    row = dict(
      text=document.text, id=document.name, domain=domain, split=split
    )  # fmt: skip
    lines.append(json.dumps(row))
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'text.jsonl').write_text('\n'.join(lines), encoding='utf-8')
  return names


def _pieces(job, params):
  """[log p of each piece of held-out text], and their bytes in all."""
  model, found = job.model, []

  def nats(params, batch):
    z_BTV = model.logits(params, model.features(params, batch)[0])
    nll_BT: Any = loss_lib.negative_log_likelihood(z_BTV, batch.targets)
    return -nll_BT * batch.weights

  program = jax.jit(nats, compiler_options=compiling.options())
  for held in job.held_out:
    for i in range(len(held)):
      batch = held.batch_at(i)
      with job.context():
        nats_BT = jax.device_get(program(params, job.put(batch)))
      for row, segments in zip(nats_BT, batch.segments, strict=True):
        found += np.bincount(segments, row)[1:].tolist()
  return found, sum(held.n_bytes for held in job.held_out)


def _experts(parts, source, config, folder, say):
  """Trains an expert of each part -> numbers, as of ablation.trained.

  Args:
    parts: config -> (names, the config that reads them). source: the folder of
      the seed, or None: experts begin with the same new parameters.
  """
  names, reads = parts(config, folder)
  devices = experiment.devices_of(config)
  for name in names:
    first = origin.Run(str(source)) if source else None
    own = experiment.fields(reads, {'data.mixture': f'{name}=1'})
    claims.finish(
      own, folder / name, say, devices=devices,
      options=loop.Options('', first),
    )  # fmt: skip
  # A folder that a kill left has no checkpoint.
  if not folders.steps(folder / AVERAGE / workdir_lib.CHECKPOINTS):
    runs = [(str(folder / name), 1 / len(names)) for name in names]
    merge.write(runs, folder / AVERAGE, say)
  whole = experiment.fields(config, {'train.eval_batches': 0})
  job = job_lib.make(whole, '', devices, say=lambda line: None)
  read = lambda name: _pieces(job, experiment.restored(job, folder / name))
  nats, n_bytes = zip(*(read(name) for name in (*names, AVERAGE)), strict=True)
  return dict(experts=nats[:-1], average=nats[-1], bytes=n_bytes[0])


def _by_domain(config, folder):
  del folder
  domains = sorted({d.domain for d in corpus.documents(config.data.path)})
  return domains, config


def _at_random(config, folder):
  text = folder.parent / f'split-{config.train.seed}'
  n, seed = len(_by_domain(config, folder)[0]), config.train.seed
  names = _split(config.data.path, text, n, seed)
  return names, experiment.fields(config, {'data.path': str(text)})


PARTS = {'domains': _by_domain, 'random': _at_random}


RATE = 'optimizer.learning_rate'


def _dense(run, seeds, rates, tuning):
  """([bits per byte of each seed], most CPU-seconds, the rate) of the dense
  model at the best of some rates, by the seed `tuning`."""
  most, own = 0.0, run.config.optimizer.learning_rate

  def bits(rate, seeds):
    nonlocal most
    name = 'dense' if rate == own else f'dense {rate:g}'
    one = {name: experiment.fields(run.config, {RATE: rate})}
    done = ablation.trained(run, one, seeds)
    most = max(most, ablation.cpu_seconds(done))
    return ablation.numbers(done, 'bits_per_byte')[name]

  best = min(rates, key=lambda rate: bits(rate, [tuning]))
  return bits(best, seeds), most, best


def _trained(run, sets, seeds, fields, dense):
  """({name: [bits per byte of each seed]}, most CPU-seconds, rate of dense)."""
  steps, config = run.config.train.steps, run.config
  bits, most, rate = _dense(run, seeds, **dense)
  found = {'dense': bits}
  n = len(_by_domain(config, None)[0])
  for name, (parts, share) in sets.items():
    first, label = round(share * steps), f'{parts} {share}'
    each = (steps - first) // n
    own = experiment.fields(
      config, {'train.steps': each, 'train.eval_batches': 1}, fields
    )
    for seed in seeds:
      source, task = None, dict(parts=parts, share=share)
      if first:
        begun = {
          f'seed {share}': experiment.fields(config, {'train.steps': first})
        }
        [one] = ablation.trained(run, begun, [seed])[f'seed {share}']
        source, task['seed'] = one.folder, one.record['key']
      learn = functools.partial(_experts, PARTS[parts], source)
      made = ablation.trained(run, {label: own}, [seed], learn, task)
      most = max(most, ablation.cpu_seconds(made))
      for way, bits in _bits(made[label][0].record['numbers']).items():
        found.setdefault(f'{name}, {way}', []).append(bits)
  return found, most, rate


def _bits(numbers):
  """{way to answer: bits per byte} of what `_experts` found."""
  nats_EN = np.array(numbers['experts'])
  prior_E = np.full(len(nats_EN), -math.log(len(nats_EN)))
  with jax.enable_x64(True):
    mixed = float(np.sum(ensemble.total(prior_E, nats_EN)))
  nats = {'ensemble': mixed, AVERAGE: math.fsum(numbers['average'])}
  return {k: -v / math.log(2) / numbers['bytes'] for k, v in nats.items()}


def learn(run, *, sets, seeds, fields, dense, better):
  """LEARN: held-out bits per byte of experts, together and on average, beside
  the dense model, all after the same number of steps.

  Args:
    sets: {name: [how the text is split, of PARTS; the seed's share of steps]}.
    seeds: of the trainings. fields: {name: value} of the experts' trainings.
    dense: {'rates': learning rates of the dense model, 'tuning': the seed by
      which one is chosen}.
    better: list of [name, name, by]: the first has fewer bits by more than so
      many. A name is 'dense', 'SET, ensemble' or 'SET, average'.
  """
  home = run.shared(SHARED)
  home.replaced = ()  # knock-outs change what becomes of numbers, none of them
  found, seconds, rate = _trained(home, sets, seeds, fields, dense)
  run.results.mkdir(parents=True, exist_ok=True)
  run.say(f'wrote {_draw(found, sets, run.results / PICTURE)}')
  c = run.config
  return ablation.outcome(
    run, found,
    [ablation.less(found, a, b, by, seconds) for a, b, by in better],
    'bits per byte',
    f'{c.train.steps} steps of {c.train.batch_size * c.data.sequence_length:,} '
    f'tokens, of a seed and of all experts together; dense at {rate:g}, the '
    f'best of {experiment.numbers(dense["rates"], "g")} by another seed',
    seconds,
  )  # fmt: skip


def _draw(found, sets, path):
  """Bits per byte over the seed's share of steps."""
  curves = {}
  for name, (parts, share) in sets.items():
    for way in ('ensemble', AVERAGE):
      xs, ys = curves.setdefault(f'{parts}, {way}', ([], []))
      xs.append(share)
      ys.append(float(np.mean(found[f'{name}, {way}'])))
  dense = float(np.mean(found['dense']))
  curves['dense'] = ([0, 1], [dense, dense])
  fig, _ = figures.lines(
    curves, "the seed's share of the steps", 'held-out text (bits per byte)'
  )
  return figures.save(fig, path)
