"""Log-likelihoods of 100 sentences: `paraxis evaluate`, lm-eval on our model,
and transformers on the same folder, which none of our code reads for it.

The folder holds a Llama of random weights in float64: sums over a sentence are
within 1e-4, where float32 adds up more than that (SmolLM2 in float32, by the
token: tests/models/huggingface/test_smollm2.py).
"""

import importlib
import json

import jax
import numpy as np
import pytest
import support

from paraxis.decode.evaluate import harness
from paraxis.models.text import tokenizer as tokenizer_lib
from paraxis.train import cli
from paraxis.train.data import files as data_files

pytestmark = [
  pytest.mark.hf,
  pytest.mark.lm_eval,
  # What lm-eval and transformers import warns of its own deprecations.
  pytest.mark.filterwarnings('ignore'),
]

TOLERANCE = 1e-4  # nats of a sentence
COUNT, HEAD = 100, 4  # sentences, words of each that are a context
DOUBLE = {'model.dtype': 'float64', 'model.param_dtype': 'float64'}
MORE = dict(
  whole="""\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
""",
  choice="""\
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
""",
)


@pytest.fixture(scope='module')
def sentences():
  """100 of the shipped manual."""
  file = data_files.FIXTURE / 'manual.jsonl'
  texts = [json.loads(line)['text'] for line in file.read_text().splitlines()]
  found = [
    sentence.strip()
    for text in texts
    for sentence in text.replace('\n', ' ').split('. ')
    if 40 < len(sentence.strip()) < 200 and len(sentence.split()) > HEAD
  ]
  assert len(found) >= COUNT
  return found[:COUNT]


@pytest.fixture(scope='module')
def theirs(tmp_path_factory):
  """(folder that transformers wrote, its model, our tokenizer of it)."""
  torch = pytest.importorskip('torch', reason='the peer needs torch')
  transformers = pytest.importorskip('transformers', reason='it is the peer')
  pytest.importorskip('lm_eval', reason='lm-eval not installed ([lm-eval])')
  ours = tokenizer_lib.load('bpe2048')
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    initializer_range=0.5, bos_token_id=ours.bos_id(None),
    eos_token_id=ours.end_id, tie_word_embeddings=False,
  )  # fmt: skip
  model = transformers.LlamaForCausalLM(config).double().eval()
  folder = tmp_path_factory.mktemp('theirs') / 'llama'
  model.save_pretrained(folder)
  (folder / 'tokenizer.json').write_text(ours.text, 'utf-8')
  return folder, model, ours


def nats_of(model, before, ids):
  """log p of `ids` after `before`, as transformers computes it."""
  torch = pytest.importorskip('torch')
  with torch.no_grad():
    logits = model(torch.tensor([[*before, *ids]]), use_cache=False).logits[0]
  assert logits.dtype == torch.float64
  lines = torch.log_softmax(logits[len(before) - 1 : -1], -1)
  return float(lines[torch.arange(len(ids)), torch.tensor(ids)].sum())


def rows_of(sentences):
  """{task: rows of its .jsonl}."""
  words = [text.split() for text in sentences]
  rest = [f' {" ".join(found[HEAD:])}' for found in words]
  choice = [
    dict(
      prompt=' '.join(found[:HEAD]), choices=[rest[i], rest[i - 1]], answer=0
    )
    for i, found in enumerate(words)
  ]
  return dict(whole=[dict(text=text) for text in sentences], choice=choice)


def wanted(model, ours, rows):
  """{task: nats of every text, of every choice} of transformers.

  Blanks at the end of a context belong to its continuation.
  """
  first = [ours.bos_id(None)]
  whole = [nats_of(model, first, ours.encode(r['text'])) for r in rows['whole']]
  choice = []
  for row in rows['choice']:
    head = ours.encode(row['prompt'].rstrip())
    for text in row['choices']:
      ids = ours.encode(row['prompt'] + text)
      assert ids[: len(head)] == head
      choice.append(nats_of(model, [*first, *head], ids[len(head) :]))
  return dict(whole=whole, choice=choice)


def by_evaluate(folder, tmp_path, capsys, changes=DOUBLE):
  """{task: nats} of the command, from the file that it writes."""
  files = {name: tmp_path / f'{name}.jsonl' for name in MORE}
  argv = ['evaluate', f'--weights={folder}', '--length=128', '--mesh=data=8']
  argv += [f'--tasks={",".join(map(str, files.values()))}']
  argv += [f'--json={tmp_path / "found.json"}']
  argv += [f'--config.{name}={value}' for name, value in changes.items()]
  assert cli.main(argv) == 0
  capsys.readouterr()
  found = json.loads((tmp_path / 'found.json').read_text())['results']
  nats = {n: [e['nats'] for e in found[str(f)]['examples']]
          for n, f in files.items()}  # fmt: skip
  return dict(
    whole=[-x for x in nats['whole']],
    choice=[x for pair in nats['choice'] for x in pair],
  )


def by_lm_eval(folder, tmp_path, monkeypatch):
  """{task: nats} of lm_eval.simple_evaluate, from the samples that it keeps."""
  monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
  evaluator = importlib.import_module('lm_eval.evaluator')
  index = importlib.import_module('lm_eval.tasks')
  for name, more in MORE.items():
    text = support.LM_EVAL_TASK.format(
      name=name, file=tmp_path / f'{name}.jsonl', more=more
    )
    (tmp_path / f'{name}.yaml').write_text(text, 'utf-8')
  harness.register()
  options = dict(weights=str(folder), mesh='data=8', max_length=128)
  found = evaluator.simple_evaluate(
    model='paraxis',
    model_args=options | dict(dtype='float64'),
    tasks=[f'paraxis_{name}' for name in MORE],
    task_manager=index.TaskManager(include_path=str(tmp_path)),
    bootstrap_iters=0,
  )['samples']
  whole = [s['filtered_resps'][0] for s in found['paraxis_whole']]
  pairs = [s['filtered_resps'] for s in found['paraxis_choice']]
  return dict(
    whole=[float(np.ravel(x)[0]) for x in whole],
    choice=[float(x[0]) for pair in pairs for x in pair],
  )


@pytest.mark.sampled(4)
def test_100_sentences(theirs, sentences, tmp_path, capsys, monkeypatch):
  folder, model, ours = theirs
  rows = rows_of(sentences)
  for name, lines in rows.items():
    text = ''.join(f'{json.dumps(row)}\n' for row in lines)
    (tmp_path / f'{name}.jsonl').write_text(text, 'utf-8')
  expected = wanted(model, ours, rows)
  assert {n: len(x) for n, x in expected.items()} == dict(whole=100, choice=200)
  assert min(np.ptp(x) for x in expected.values()) > 50  # nats: no constants
  with jax.enable_x64(True):
    found = dict(
      evaluate=by_evaluate(folder, tmp_path, capsys),
      lm_eval=by_lm_eval(folder, tmp_path, monkeypatch),
    )
  for who, tasks in found.items():
    for name, nats in tasks.items():
      error = np.abs(np.subtract(nats, expected[name]))
      assert error.max() < TOLERANCE, (who, name, error.max())
  # An epsilon of 1e-5 for 1e-6, and it is seen.
  changed = DOUBLE | {'model.norm_epsilon': 1e-5}
  with jax.enable_x64(True):
    other = by_evaluate(folder, tmp_path, capsys, changed)
  error = np.abs(np.subtract(other['whole'], expected['whole']))
  assert error.max() > TOLERANCE
