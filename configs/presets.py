"""What most configs begin with: six whole configs, and GPT-2's layers.

A preset takes fields of the model and sets what its docstring lists; the rest
is schema.default(). get_config() then edits what is its paper's own:

    config = presets.tiny(num_layers=4, mlp='gelu')
    config.mesh.update(stage=4, data=2)

quickstart.py uses none: it spells every choice out.
"""

from paraxis.configs import schema

# Fields of the model; max_positions is the paper's own.
GPT2 = dict(
  norm='layernorm',
  norm_epsilon=1e-5,
  mlp='gelu',
  mlp_bias=True,
  attention_bias=True,
  attention_output_bias=True,
  position='learned',
)


# Of claims on train/claims/on_lists.py; whoever gives the same shares models.
LISTS = dict(
  task=dict(
    least=4, most=8, items=12,
    operations=('copy', 'sort', 'shuffle', 'replace'),
  ),
  fields={
    'model.d_model': 128, 'model.num_layers': 4, 'model.num_heads': 4,
    'model.d_ff': 256, 'train.steps': 3000, 'train.batch_size': 64,
    'optimizer.learning_rate': 2e-3, 'optimizer.warmup_steps': 100,
  },
  seeds=[0, 1, 2],
)  # fmt: skip
# Fields of a `masked_lists` that is as small as claims of equality need.
SMALL_MASKED = {
  'model.vocab_size': 12, 'model.mask_id': 11, 'model.d_model': 16,
  'data.tokenizer': 'bytes',
}  # fmt: skip
# Trainings of one-pass decoders (train/claims/on_frames.py), but their steps.
FRAMES = dict(
  fields={
    'train.batch_size': 32, 'optimizer.learning_rate': 2e-3,
    'optimizer.warmup_steps': 50,
  },
  seeds=[0, 1, 2], rows=512,
)  # fmt: skip


def tiny(**model):
  """2 layers of width 64 on bytes: compared with one device in seconds.

  264 vocabulary rows (256 bytes, special tokens, divisible by 8), 4 heads, an
  mlp of 128, 4 rows of 64 tokens.
  """
  config = schema.default()
  config.model.update(
    vocab_size=264, d_model=64, d_ff=128, num_layers=2, num_heads=4
  )
  config.model.update(model)
  config.data.update(tokenizer='bytes', sequence_length=64)
  config.train.batch_size = 4
  return config


def deep_bytes(**model):
  """6 layers of width 48 on bytes, 180K parameters, 500 steps: a minute or two.

  4 heads, an mlp of 128, 16 rows of 128 tokens, adamw with 40 steps of warm-up.
  """
  config = tiny(num_layers=6, d_model=48)
  config.model.update(qk_norm='head', embedding_scale=48**0.5)
  config.model.update(model)
  config.data.sequence_length = 128
  config.optimizer.update(
    name='adamw', learning_rate=5e-3, warmup_steps=40, final_fraction=0.1
  )
  config.train.update(steps=500, batch_size=16, eval_batches=8, print_every=50)
  return config


def masked_lists(**model):
  """`tiny`, a masked model whose vocabulary is that of LISTS."""
  config = tiny(visibility='full', vocab_size=21, mask_id=20)
  config.model.update(model)
  config.train.objective = 'masked'
  return config


def small_text(**model):
  """The quickstart's model, text and learning rates, for 300 steps: minutes.

  4 layers of width 160 with 4 heads and an mlp of 432, BPE of 2,048 entries, 8
  rows of 256 tokens, muon with 30 steps of warm-up. Embeddings are scaled by
  sqrt(d_model); with qk_norm='head' (not the default) scores are sharpened, as
  in quickstart.py.
  """
  config = schema.default()
  config.model.update(
    vocab_size=2048, d_model=160, d_ff=432, num_layers=4, num_heads=4
  )
  config.model.update(model)
  config.model.embedding_scale = config.model.d_model**0.5
  if config.model.qk_norm == 'head':
    width = config.model.d_model // config.model.num_heads
    config.model.attention_scale = 3 * width**-0.5
  config.data.update(tokenizer='bpe2048', sequence_length=256)
  config.optimizer.update(
    name='muon', learning_rate=3e-3, matrix_learning_rate=0.02, warmup_steps=30
  )
  config.train.update(steps=300, batch_size=8)
  return config


def llama(**model):
  """A Llama's training in bfloat16, without its sizes and learning rate.

  An untied head, 1,024 rows of 4,096 tokens for 500,000 steps, 2,000 of them
  warm-up, a cosine to a tenth, blocks of 512 in attention, full
  rematerialization.
  """
  config = schema.default()
  config.model.update(norm_epsilon=1e-5, tied_embedding=False)
  config.model.update(dtype='bfloat16', attention_block=512)
  config.model.update(model)
  config.data.sequence_length = 4096
  config.optimizer.update(warmup_steps=2000, final_fraction=0.1)
  config.train.update(batch_size=1024, steps=500_000, remat='full')
  return config


# Of claims on train/claims/outer/learning.py: what is compared, fields of
# schema.Outer. Configs that give the same name and fields share trainings.
_PERIOD = 50
_DILOCO = dict(exchange='mean', period=_PERIOD, momentum=0.9, nesterov=True)
_STREAMED = _DILOCO | dict(rate=0.4, fragments=2, mixing=0.5)
_CO2 = dict(
  exchange='mean', period=12, delay=12, rate=1.0, momentum=0.2, nesterov=False,
  clip=1.0,
)  # fmt: skip
_NOLOCO = dict(period=40, rate=0.7, momentum=0.5, nesterov=False)
REPLICAS = {
  'data parallel': {},
  'mean': dict(exchange='mean', period=_PERIOD, rate=1.0, momentum=0.0),
  'DiLoCo .7': _DILOCO | dict(rate=0.7),
  'DiLoCo .4': _DILOCO | dict(rate=0.4),
  'DiLoCo .2': _DILOCO | dict(rate=0.2),
  'streamed': _STREAMED | dict(delay=1),
  'streamed, 5 late': _STREAMED | dict(delay=5),
  'streamed, 10 late': _STREAMED | dict(delay=10),
  'streamed, 4 bits': _STREAMED | dict(delay=1, codec='e3m0'),
  'mean of 12': dict(exchange='mean', period=12, rate=1.0, momentum=0.0),
  'CO2': _CO2 | dict(penalty=True),
  'CO2 .5': _CO2 | dict(penalty=True, rate=0.5),
  'CO2, no penalty': _CO2,
  'CO2 .5, no penalty': _CO2 | dict(rate=0.5),
  'DiLoCo, as NoLoCo': _NOLOCO | dict(exchange='mean'),
  'NoLoCo': _NOLOCO | dict(exchange='pairs', pull=0.7),
}
# Knock-outs: the mean, after all steps, of replicas that never met; loops of
# which a function replaces a part; anchors that do not approach.
NEVER = {
  'mean, never met': dict(
    exchange='mean', period=1000, rate=1.0, momentum=0.0
  ),
}  # fmt: skip
UNPAIRED = {'NoLoCo, alone': REPLICAS['NoLoCo']}
NO_PULL = {'NoLoCo, no pull': REPLICAS['NoLoCo'] | dict(pull=0.0)}
WARM = 330  # steps of data parallel, a quarter of all tokens


def replicas(name):
  """154K parameters on BPE, 1,000 steps of 4 replicas with 512 tokens each.

  name: of REPLICAS, its outer loop.
  """
  config = schema.default()
  config.mesh.replica = 4
  config.outer.update(REPLICAS[name])
  model = config.model
  model.update(vocab_size=2048, d_model=48, num_layers=2, num_heads=4, d_ff=128)
  model.update(qk_norm='head', tied_embedding=True)
  model.update(embedding_scale=48**0.5, attention_scale=3 * 12**-0.5)
  config.data.update(path='fixture', tokenizer='bpe2048', sequence_length=256)
  config.optimizer.update(
    name='adamw', learning_rate=1e-2, warmup_steps=40, final_fraction=0.1
  )
  config.train.update(steps=1000, batch_size=8, print_every=50)
  config.train.update(eval_batches=4, eval_every=480)
  config.checkpoint.every = 250
  return config
