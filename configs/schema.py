"""Every field of a run's configuration: meaning, unit, default, valid values.

One frozen dataclass per section; base/model.py and base/data.py have theirs.
`default()` gives the same fields as a locked `ConfigDict` (what a config file
edits and `--config.section.field=` overrides), `view()` turns a ConfigDict back
into the typed, checked `Config` that the code reads, and `to_json` /
`from_json` carry it through a workdir without ever executing Python. Only the
standard library and ml_collections: printing a config must not start jax.
"""

import dataclasses
import functools
import json
from typing import Any

import ml_collections

from paraxis.configs.base import extra as extra_lib
from paraxis.configs.base.checkpoint import Checkpoint
from paraxis.configs.base.data import Data
from paraxis.configs.base.decode import Decode
from paraxis.configs.base.errors import IntegrityError
from paraxis.configs.base.errors import UserError
from paraxis.configs.base.field import check
from paraxis.configs.base.field import field
from paraxis.configs.base.field import suggest
from paraxis.configs.base.lora import Lora
from paraxis.configs.base.model import Model
from paraxis.configs.base.optimizer import RENAMED as _OPTIMIZER
from paraxis.configs.base.optimizer import Optimizer
from paraxis.configs.base.outer import Outer
from paraxis.configs.base.spike import Spike


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Devices along each mesh axis; their product is the number of devices."""

  replica: int = field(
    1,
    'copies of the parameters: the gradient of every step is averaged over '
    'them, or each steps alone (outer.exchange)',
  )
  stage: int = field(1, 'pipeline stages')
  data: int = field(1, 'batch shards; mesh.zero says what else they shard')
  fsdp: int = field(1, 'batch shards that also shard parameters')
  context: int = field(1, 'sequence shards')
  tensor: int = field(1, 'shards of heads, mlp and vocabulary')
  rules: str = field(
    'fsdp_tensor',
    'preset in sharding/rules.py that maps logical to mesh axes; auto: tensor '
    'has what the program of the model lets it split',
  )
  zero: int = field(
    0,
    'ZeRO stage, over data: 1 shards optimizer state, 2 gradients too, 3 '
    'parameters too (fsdp always shards all three)',
    low=0,
    high=3,
  )
  sequence: bool = field(
    True, 'sequence parallelism: residuals and norms are sharded over tensor'
  )
  context_form: str = field(
    'ring',
    'context parallel attention algorithm (sharding/sequence/attention.py)',
    ('all_gather', 'ring', 'ulysses', 'usp', 'token_ring', 'rsa'),
  )
  context_order: str = field(
    'auto',
    'token order over context shards; auto: contiguous if every layer has a '
    'window, or one is a recurrence, which allows no other; else zigzag',
    ('auto', 'zigzag', 'contiguous', 'striped'),
  )
  context_inner: int = field(
    0, 'usp: context shards that exchange heads; 0: as many as possible', low=0
  )
  context_scan: str = field(
    'permute',
    'how recurrent state is passed over the context axis: one all-gather, or '
    'log2(context) permutes (sharding/sequence/scan.py)',
    ('gather', 'permute'),
  )
  collectives: str = field(
    'annotated',
    'annotated: XLA sums gradients in every microbatch; explicit (always with '
    'stages, outer.exchange): ours, once a step but over fsdp or if zero > 1',
    ('annotated', 'explicit'),
  )
  expert_order: str = field(
    '',
    "expert that each slot of the experts' stacks holds, '3,0,2,1', so that "
    "the first of a region's devices has the first of them; '': in order",
  )
  collective_matmul: str = field(
    '',
    "projections computed as rings that overlap communication: 'qkv', "
    "'output', 'gate_up', 'down', separated by commas, or 'all'",
  )


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """Pipeline parallelism (mesh.stage > 1)."""

  schedule: str = field(
    'one_f_one_b',
    'pipeline schedule (paraxis plot schedule draws it)',
    ('gpipe', 'one_f_one_b', 'interleaved', 'zero_bubble', 'v_half', 'skip'),
  )
  chunks: int = field(
    1, 'virtual stages each; interleaved > 1, v_half 2, 1F1B and skip 1', low=1
  )
  microbatches: int = field(
    0, 'pipeline microbatches per accumulation slice; 0: mesh.stage', low=0
  )
  activations: str = field(
    'recompute',
    'recompute: a stage stores only its inputs; store: the activations that '
    'its backward pass reads (set by train.remat; zero_bubble, v_half: all)',
    ('recompute', 'store'),
  )
  skip_fraction: float = field(
    0.0, 'skip: share of the stages that a microbatch skips', low=0.0,
    high=0.9,
  )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Train:
  """Training loop."""

  steps: int = field(480, 'optimizer steps', low=1)
  objective: str = field(
    'next_token',
    'training objective: next_token; masked: masked diffusion (LLaDA), masks '
    'are model.mask_id; block: block diffusion, each masked block sees the '
    'clean blocks before it (train/data/objectives.py)',
    ('next_token', 'masked', 'block'),
  )
  complementary: bool = field(
    False, 'masked, block: two rows are one text with complementary masks'
  )
  estimator: str = field(
    'backprop',
    'gradient estimator: backprop; zeroth_order (MeZO): slope along a random '
    'direction, from two forward passes (train/steps/zeroth_order.py); of '
    'optimizer it reads learning_rate, the schedule, weight_decay and '
    'clip_norm only',
    ('backprop', 'zeroth_order'),
  )
  perturbation: float = field(
    1e-3, 'zeroth_order: step of the finite difference', low=1e-9
  )
  batch_size: int = field(
    8, 'global batch: rows in a step over all devices', low=1
  )
  batch_ramp: str = field(
    '',
    "rows in a step at the start: '32:32:100' begins with 32 and adds 32 every "
    '100 steps up to batch_size; empty: batch_size from the first step on',
  )
  shape_cycle: str = field(
    '',
    "pieces that a step cuts its rows into: '4:100,2:100,1:200' for 100 steps "
    '4 rows of a quarter of the tokens, for 100 two of half, for 200 whole '
    'rows, and so again; a last one without steps stays; empty: whole rows',
  )
  microbatches: int = field(1, 'gradient accumulation slices', low=1)
  freeze: str = field(
    '',
    "frozen parameters, by patterns of their paths: 'embedding,layers/mlp/*' "
    '(`paraxis checkpoint inspect` lists the paths, below params/)',
  )
  learn: str = field(
    '', "patterns of what adapters or train.side do not freeze: 'head'"
  )
  lora: Lora = Lora()
  side: int = field(
    0,
    'width of a network beside frozen layers that reads their states '
    '(models/side.py); 0: none',
    low=0,
  )
  seed: int = field(
    0, 'random seed of parameters and data order', low=0, high=2**31 - 1
  )
  remat: str = field(
    'none',
    'rematerialization: none; attention (store attention outputs); dots (and '
    'matmul outputs); full (store only layer inputs). With pipeline stages it '
    'applies within a backward phase or to pipeline.activations=store; '
    'zero_bubble and v_half store everything',
    ('none', 'attention', 'dots', 'full'),
  )
  memory: str = field(
    '',
    "policy of named activations, 'attention=offload,gate=save': save, "
    'offload (to the host) or recompute (models/memory.py)',
  )
  eval_every: int = field(
    0, 'steps between evaluations; 0: only at the end', low=0
  )
  eval_batches: int = field(
    0, 'evaluation batches of batch_size rows per domain; 0: all', low=0
  )
  print_every: int = field(20, 'steps between printed lines', low=1)
  log_every: int = field(
    1,
    'steps between rows of metrics.jsonl, TensorBoard and W&B; printed lines, '
    'checkpoints and the end have one too; a row counts the tokens since the '
    'one before',
    low=1,
  )
  max_nonfinite_steps: int = field(
    5, 'consecutive non-finite (skipped) steps before an error', low=1
  )
  spike: Spike = Spike()
  drift_every: int = field(
    0,
    'steps between bitwise checks that copies of a shard on several devices '
    'are equal; 0: only at the start and in each checkpoint',
    low=0,
  )
  stall_seconds: int = field(
    1800,
    'seconds without progress after which a process ends with code 13 and the '
    'stack of every thread; of a step 20 times the median step, at least two '
    'minutes, if that is less; 0: never',
    low=0,
  )
  tensorboard: bool = field(False, 'also write tensorboard events')
  wandb: str = field('', 'also log to this wandb project')


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run."""

  mesh: Mesh = Mesh()
  pipeline: Pipeline = Pipeline()
  model: Model = Model()
  data: Data = Data()
  optimizer: Optimizer = Optimizer()
  outer: Outer = Outer()
  train: Train = Train()
  checkpoint: Checkpoint = Checkpoint()
  decode: Decode = Decode()

  @property
  def extra(self) -> Any:
    """What the user's file declares (base/extra.py); models read it too."""
    return self.model.extra

  @property
  def microbatches(self):
    """Microbatches of a step: accumulation slices x pipeline microbatches."""
    per_slice = self.pipeline.microbatches or max(self.mesh.stage, 1)
    return self.train.microbatches * per_slice

  @property
  def microbatch_rows(self):
    """Rows of a microbatch; UserError if they do not divide."""
    rows, slices = self.train.batch_size, self.train.microbatches
    parts = self.microbatches
    if rows % parts:
      what = f'train.microbatches={slices}'
      if parts > slices:
        what += f' x {parts // slices} (pipeline.microbatches; 0: the stages)'
      raise UserError(f'train.batch_size={rows} is not divisible by {what}.')
    return rows // parts


# Old names of fields that files may still have -> today's names.
RENAMED = {f'optimizer.{old}': new for old, new in _OPTIMIZER.items()}
SECTIONS: dict[str, Any] = {
  f.name: type(f.default) for f in dataclasses.fields(Config)
}


def default(loaded=False):
  """A locked ConfigDict of defaults; loaded: and of what a file declared."""
  sections = to_dict(Config()) | {extra_lib.NAME: extra_lib.usual(loaded)}
  return ml_collections.ConfigDict(sections).lock()


def declare_extra(config, given):
  """A ConfigDict with the user's own hyperparameters in config.extra, too.

  given: their defaults, as base/extra.py says: a dataclass, or a dict.
  """
  own = extra_lib.declare(given, config.get(extra_lib.NAME, {}))
  with config.unlocked(), config.ignore_type():
    config[extra_lib.NAME] = ml_collections.ConfigDict(own)
  return config.lock()


def fields():
  """Yields (dotted name, dataclasses.Field), in the order of the file."""
  yield from _fields('', Config)
  yield from extra_lib.fields()


def _fields(prefix, section):
  for f in dataclasses.fields(section):
    name = f'{prefix}{f.name}'
    if not dataclasses.is_dataclass(f.default):
      yield name, f
    elif f.name != extra_lib.NAME:
      yield from _fields(f'{name}.', type(f.default))


def value(config, name):
  """The value of a dotted field of a `Config`."""
  return functools.reduce(getattr, name.split('.'), config)


def with_value(config, name, new):
  """A `Config`, or a section of one, with another value of a dotted field."""
  head, _, rest = name.partition('.')
  if head == extra_lib.NAME and isinstance(config, Config):
    return with_value(config, f'model.{name}', new)
  inner = with_value(getattr(config, head), rest, new) if rest else new
  return dataclasses.replace(config, **{head: inner})


def with_values(config, values):
  """A `Config` with {dotted field: value} set, unchecked."""
  for name, new in values.items():
    config = with_value(config, name, new)
  return config


def view(config, saved=False):
  """ConfigDict or nested dict -> `Config`. UserError names the bad field.

  saved: it is of a file: its `extra` is kept as it is.
  """
  data = config.to_dict() if hasattr(config, 'to_dict') else dict(config)
  for name in data:
    if name not in (*SECTIONS, extra_lib.NAME):
      raise UserError(
        f'unknown config section {name!r}.' + suggest(name, SECTIONS)
      )
  made = Config(**{n: _section(n, c, data) for n, c in SECTIONS.items()})
  own = config[extra_lib.NAME] if extra_lib.NAME in config else {}
  own = extra_lib.make(own, made.model.pattern, saved)
  return with_value(made, f'model.{extra_lib.NAME}', own)


def _section(name: str, section, data) -> Any:
  """A dataclass of `Config` from its dict in `data`, which may lack it."""
  valid = {
    f.name: f for f in dataclasses.fields(section) if f.name != extra_lib.NAME
  }
  given, out = dict(data.get(name.split('.')[-1], {})), {}
  for key, new in given.items():
    key = RENAMED.get(f'{name}.{key}', key)
    path = f'{name}.{key}'
    if key not in valid:
      raise UserError(f'unknown config key {path}.' + suggest(key, valid))
    if key in out:
      raise UserError(f'{path} is given twice, once by its old name.')
    inner = valid[key].default
    if dataclasses.is_dataclass(inner):
      out[key] = _section(path, type(inner), given)
    else:
      out[key] = check(path, valid[key], new)
  return section(**out)


def to_dict(config):
  """`Config` -> nested dict, as `view` takes it."""
  data = dataclasses.asdict(config)
  return data | {extra_lib.NAME: data['model'].pop(extra_lib.NAME)}


def to_json(config):
  """`Config` -> text, one field a line."""
  return json.dumps(to_dict(config), indent=1) + '\n'


def from_json(text, where: object = 'this'):
  """Text -> `Config`; fields that the text lacks take their defaults.

  where: what messages call it.

  Raises:
    IntegrityError: it is no JSON object of sections. UserError: a field is
      unknown, or has a value that it may not have.
  """
  try:
    data = json.loads(text)
    if not isinstance(data, dict):
      raise TypeError(f'it is {type(data).__name__}, not an object of sections')
    return view(data, saved=True)
  except UserError:
    raise
  except (ValueError, TypeError, AttributeError, RecursionError) as e:
    raise IntegrityError(f'{where} is no configuration: {e}.') from None
