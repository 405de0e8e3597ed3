"""What a run refuses at once: before jax starts and before data is read.

In this order: fields of the model that contradict each other (models/checks.py;
kernels, the mesh and its devices need jax), the steps to trace, the folder.
"""

from paraxis.configs.base import errors
from paraxis.models import checks
from paraxis.train.data import corpus
from paraxis.train.data import objectives
from paraxis.train.run import spikes
from paraxis.train.run import workdir as workdir_lib


def check(config, workdir='', profile='', from_scratch=False):
  """UserError, IntegrityError: the run cannot be.

  Args:
    config: schema.Config, as the run is to have it. workdir: its folder; ''
      is not looked at. profile: --profile=. from_scratch: --from_scratch.
  """
  checks.check_fields(config.model)
  length = config.data.sequence_length
  checks.check_length(config.model, length, 'data.sequence_length')
  objectives.check(config)
  traced(profile, config.train.steps)
  spikes.check(config)
  if workdir:
    workdir_lib.check(workdir, corpus.with_places(config), from_scratch)


def traced(text: str, steps: int) -> tuple[int, int] | None:
  """'5:8' -> (5, 8), first and last step, '' -> None; UserError: neither."""
  if not text:
    return None
  first, colon, last = text.partition(':')
  found = [int(n) if n.isdecimal() else 0 for n in (first, last or first)]
  if not 1 <= found[0] <= found[1] <= steps or colon and not last:
    raise errors.UserError(
      f'--profile={text} is not FIRST:LAST, steps 1 to train.steps={steps}.'
    )
  return found[0], found[1]
