"""Claims about experts that were trained: what they cost, and learn, and take.

Small models on the shipped text of six domains, several seeds; the claims of
one config share the runs, which lie in folders of the workdir, and are gone on
with where they stopped. Held-out text is told in bits per byte.

How far experts specialise is the mutual information of domain and expert on
held-out text, with all domains as likely, in bits, the mean over layers:

    I = mean over domains of sum_e p(e | domain) log2 (p(e | domain) / p(e))

0: every domain uses all experts alike; at most log2 of the experts, or of the
domains. Assignments are counted as in training, through the gradient of the
parameters `load` (models/router.py).

Legend: L layers, E experts.
"""

import functools
import math

import jax
import numpy as np

from paraxis.configs import errors
from paraxis.models import depth
from paraxis.train import claims_experts
from paraxis.train import compiling
from paraxis.train import expert_counts
from paraxis.train import job as job_lib
from paraxis.train import loop
from paraxis.train import loss as loss_lib
from paraxis.train import plot
from paraxis.train import plot_experts
from paraxis.train import workdir as workdir_lib

PARAMS = 'params/'
PICTURE = 'scopes.png'


def train(run, name, config):
  """(held-out bits per byte, job.Job, parameters) of a finished training.

  Args:
    run: claims.Run; the training lies in its folder `name`.
    config: schema.Config, on the first devices.

  Raises:
    SystemExit: with 75, a signal stopped it.
  """
  sizes = {a: getattr(config.mesh, a) for a in ('data', 'fsdp', 'tensor')}
  devices = jax.devices()[: math.prod(sizes.values())]
  folder = run.workdir / name
  run.say(f'training {name}')
  result = loop.run(config, folder, say=run.say, devices=devices)
  if result['stopped']:
    run.say('the same command goes on from here')
    raise SystemExit(errors.EXIT_PREEMPTED)
  # Whole rows of held-out text, not a microbatch at a time.
  wide = claims_experts.changed(config, microbatches=1)
  job = job_lib.make(wide, '', devices, say=lambda line: None)
  bits = result['evaluation'].bits_per_byte
  return bits, job, _restored(job, folder)


def _restored(job, folder):
  """Parameters of the newest checkpoint of a folder, on the job's mesh."""
  from paraxis.sharding import store as store_lib  # Orbax starts slowly

  like = {PARAMS + p: x for p, x in job.built.params.items()}
  folder = workdir_lib.resolve(folder) / workdir_lib.CHECKPOINTS
  with store_lib.Store(folder, read_only=True) as store:
    _, tree, _ = store.restore_latest_good(like, PARAMS)
  return {p.removeprefix(PARAMS): x for p, x in tree.items()}


def domain_loads(job, params):
  """{domain: (L, E) float}: assignments of its held-out text, layers in order.

  All layers of the model must have as many experts.
  """
  model, run = job.model, None
  paths = expert_counts.paths(model, (expert_counts.LOAD,))

  def count(params, batch):
    of = lambda mine: loss_lib.next_token(model, params | mine, batch)
    return jax.grad(of)({p: params[p] for p in paths})

  out = {}
  with job.context():
    for held in job.held_out:
      total = 0
      for i in range(len(held)):
        batch = job.put(held.batch_at(i))
        run = run or compiling.compile_step('loads', count, params, batch)
        found = jax.device_get(run(params, batch))
        rows = [
          depth.to_order(found[p], model.rows.get(p))[:, :-2] for p in paths
        ]
        total = total + np.concatenate(rows).astype(float)
      out[held.domain] = total
  return out


def mutual_information(loads):
  """Bits of domain and expert, mean over layers, of {domain: (L, E)}."""
  counts = np.array(list(loads.values()))
  given = counts / counts.sum(-1, keepdims=True)
  ratio = given / np.maximum(given.mean(0), 1e-300)
  bits = given * np.log2(ratio, where=given > 0, out=np.zeros_like(given))
  return float(bits.sum(-1).mean())


@functools.lru_cache(maxsize=4)
def _scopes(run, scopes, seeds):
  """{scope: [(held-out bits per byte, mutual information) of each seed]}."""
  found, folders = {s: [] for s in scopes}, []
  last = {}
  for seed in seeds:
    for scope in scopes:
      config = claims_experts.changed(
        run.config, balance_scope=scope, seed=seed
      )
      name = f'{scope}{seed}'
      bits, job, params = train(run, name, config)
      last[scope] = domain_loads(job, params)
      found[scope].append((bits, mutual_information(last[scope])))
      folders.append(run.workdir / name)
      run.say(
        f'{scope}, seed {seed}: {bits:.4f} bits per byte, domain and expert '
        f'share {found[scope][-1][1]:.4f} bits'
      )
  path = workdir_lib.resolve(run.workdir) / PICTURE
  run.say(f'wrote {plot_experts.draw_domains(last, path)}')
  run.say(f'wrote {plot.draw(folders, run.workdir / plot.NAME)}')
  return found
