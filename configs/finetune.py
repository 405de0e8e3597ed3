"""Fine-tuning: what pretrained weights are tuned with

paper: none
mechanism: train/run/origin.py, train/updates/tuning.py, models/trained.py
test: tests/configs/test_finetune.py, tests/train/updates/test_tuning.py,
  tests/train/test_lora.py
run: paraxis reproduce finetune
cost: 20 CPU-seconds
expect: EQ 3e-15 in float64 (bound 1e-9), of all parameters on fsdp=8, and of
  adapters on data=2,fsdp=2,tensor=2.
differs: no paper. The rate, the warm-up and no decay are what others use, not a
  sweep of ours. Without --init_from the model is small, its weights random, and
  the rate far too low for them.
"""

from paraxis.configs import schema


def get_config():
  """1,000 steps of 8 rows of 1,024 tokens, AdamW at 2e-5, one device.

    paraxis train --config=configs/finetune.py --init_from=smollm2 \\
      --config.data.path=FILE --workdir=RUN

  The model and the tokenizer are those of --init_from. More devices:
  --mesh=fsdp=-1. Adapters alone (LoRA) are tuned at 2e-4, ten times the rate:
  --config.train.lora.rank=8 --config.optimizer.learning_rate=2e-4. With other
  steps give the warm-up, too: 3% of them. Conversations:
  --config.data.loss_on=assistant. On a GPU or TPU most compute in bfloat16:
  --config.model.dtype=bfloat16.
  """
  config = schema.default()

  config.data.sequence_length = 1024
  config.data.packing = 'first_fit'  # a conversation keeps its questions

  optimizer = config.optimizer
  optimizer.name = 'adamw'
  optimizer.learning_rate = 2e-5
  optimizer.b2 = 0.999
  optimizer.weight_decay = 0.0  # pretrained weights are not drawn to zero
  optimizer.clip_norm = 1.0
  optimizer.warmup_steps = 30
  optimizer.schedule = 'cosine'
  optimizer.final_fraction = 0.0

  config.train.steps = 1000
  config.train.batch_size = 8
  config.checkpoint.every = 500
  return config


def claims():
  """What `paraxis reproduce finetune` checks."""
  from paraxis.train.claims import experiment

  adapters = {'mesh': 'data=2,fsdp=2,tensor=2', 'train.lora.rank': 8}
  equal = experiment.on_layouts('fsdp=8', adapters)
  return [('loss and all gradients equal one device', 'EQ', equal, None)]


def knockouts():
  """A parameter that is another one on the layouts than on one device."""
  from paraxis.train.claims import knockouts as off

  ((name, *_),) = claims()
  adapters = {'mesh': 'data=2,fsdp=2,tensor=2', 'train.lora.rank': 8}
  change = {'cases': [adapters]}
  return [('one_parameter_wrong', name, off.one_parameter_wrong, change)]
