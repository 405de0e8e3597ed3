"""The evaluate command on a saved run: figures, files, and what it refuses."""

import json
import math

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.decode.evaluate import command
from paraxis.decode.evaluate import score
from paraxis.decode.evaluate import tasks
from paraxis.models import batch
from paraxis.models import build
from paraxis.train import cli

SIZES = dict(
  vocab_size=264, d_model=16, num_layers=1, num_heads=2, d_ff=32,
  embedding_init_std=1.0, tied_embedding=False,
)  # fmt: skip
BOS = 258
QUIZ = (
  dict(prompt='Sea and', choices=['wind', 'the long sail', 'x'], answer=1),
  dict(question='Gull: ', choices=['a', 'bc'], answer=0),
  dict(prompt='', choices=['north', 'over'], answer=1, more='is not read'),
)


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """(a workdir with step 3, its Built on one device, its parameters)."""
  config = schema.view(
    {
      'model': SIZES,
      'mesh': dict(data=2, tensor=2),
      'data': dict(tokenizer='bytes', sequence_length=32),
    }
  )
  built, params = support.untrained(config)
  workdir = tmp_path_factory.mktemp('run')
  return support.save_run(workdir, config, built, params, (3,)), built, params


@pytest.fixture
def run(made, capsys, tmp_path, monkeypatch):
  """run(files, *flags) -> (exit code, stdout, lines of stderr).

  files: {name: text, or rows of .jsonl}, written into a folder and evaluated.
  """
  monkeypatch.chdir(tmp_path)

  def call(files, *flags, model=(f'--checkpoint={made[0]}',)):
    for name, rows in files.items():
      if not isinstance(rows, str):
        rows = ''.join(f'{json.dumps(row)}\n' for row in rows)
      (tmp_path / name).write_text(rows, 'utf-8')
    named = [f'--tasks={",".join(files)}'] if files else []
    code = cli.main(['evaluate', *model, *named, *flags])
    out, err = capsys.readouterr()
    return code, out, err.splitlines()

  return call


def log_p(made, context, text):
  """The log-likelihood of bytes, token by token, unpadded."""
  _, built, params = made
  model, ids = built.model, [*context, *text.encode()]
  row = lambda x: np.array(x, np.int32)[None]
  t = len(ids) - 1
  data = batch.Batch(row(ids[:-1]), None, row([1] * t), row(range(t)), None, 1)
  with build.use(built):
    score = jax.jit(lambda p: model.logits(p, model.features(p, data)[0]))
    z_TV = np.asarray(score(params)[0], np.float64)
  table = z_TV - np.log(np.exp(z_TV).sum(-1, keepdims=True))
  return sum(table[i - 1, ids[i]] for i in range(len(context), len(ids)))


def test_texts(run, made, tmp_path):
  """Bits per byte, loss and perplexity are sums over all documents."""
  files = {
    'a.txt': 'Calm \u00e9\n',
    'b.md': '# North\n',
    'c.jsonl': [dict(body='Rock', id=1), dict(body='and salt')],
  }
  code, out, err = run(files, '--json=out.json', '--text_key=body')
  found = json.loads((tmp_path / 'out.json').read_text('utf-8'))
  assert code == 0 and found['step'] == 3 and found['sequence_length'] == 32
  assert any('mesh data=2,tensor=2, here are 8 devices' in line for line in err)
  lines = [line.split() for line in out.splitlines()]
  assert lines[0] == ['task', 'kind', 'examples', 'metric', 'value', 'stderr']
  assert len(lines) == 10 and len(set(map(len, out.splitlines()))) == 1
  for name, rows in files.items():
    texts = [rows] if isinstance(rows, str) else [row['body'] for row in rows]
    nats = [-log_p(made, [BOS], text) for text in texts]
    sizes = [len(text.encode()) for text in texts]
    bits = sum(nats) / math.log(2) / sum(sizes)
    metrics = found['results'][name]['metrics']
    assert metrics['bits_per_byte']['value'] == pytest.approx(bits, abs=1e-4)
    loss = sum(nats) / sum(sizes)  # a token is a byte
    assert metrics['loss']['value'] == pytest.approx(loss, abs=1e-4)
    perplexity = metrics['perplexity']['value']
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert [name, 'text', str(len(texts)), 'loss', f'{loss:.4f}'] in [
      line[:5] for line in lines
    ]
  examples = found['results']['c.jsonl']['examples']
  assert [e['nats'] for e in examples] == pytest.approx(nats, abs=1e-4)


def test_a_perplexity_above_all_numbers(run, tmp_path, monkeypatch):
  bad = lambda self, texts, first: [(-800.0 * len(t), len(t)) for t in texts]
  monkeypatch.setattr(score.Scorer, 'rolling', bad)
  code, out, _ = run({'a.txt': 'abc'}, '--json=out.json')
  assert code == 0 and out.splitlines()[-1].split()[-3:] == [
    'perplexity', 'inf', '-',
  ]  # fmt: skip
  found = json.loads((tmp_path / 'out.json').read_text('utf-8'))
  metrics = found['results']['a.txt']['metrics']
  assert metrics['perplexity'] == dict(value=None, stderr=None)
  assert metrics['loss']['value'] == 800


def test_multiple_choice(run, made, tmp_path):
  """By the sum, and by the byte; a blank joins what has none."""
  code, out, _ = run({'q.jsonl': QUIZ}, '--json=out.json', '--mesh=data=8')
  found = json.loads((tmp_path / 'out.json').read_text('utf-8'))
  found = found['results']['q.jsonl']
  contexts = [(b'Sea and', ' '), (b'Gull:', ' '), (b'', '')]
  hits = dict(acc=[], acc_norm=[])
  for row, (text, blank), example in zip(
    QUIZ, contexts, found['examples'], strict=True
  ):
    nats = [log_p(made, [BOS, *text], blank + c) for c in row['choices']]
    assert example['nats'] == pytest.approx(nats, abs=1e-4)
    each = [n / len(c) for n, c in zip(nats, row['choices'], strict=True)]
    hits['acc'].append(int(np.argmax(nats)) == row['answer'])
    hits['acc_norm'].append(int(np.argmax(each)) == row['answer'])
  for name, values in hits.items():
    metric = found['metrics'][name]
    assert metric['value'] == pytest.approx(np.mean(values))
    error = np.std(values, ddof=1) / math.sqrt(3)
    assert metric['stderr'] == pytest.approx(error)
  assert code == 0 and out.count('choice') == 2


def test_exact_match_is_greedy_decoding(run, made, capsys, tmp_path):
  """The answer is what `paraxis decode` prints up to a line break."""
  argv = ['decode', f'--checkpoint={made[0]}', '--prompt=Sea', '--json']
  argv += ['--temperature=0', '--max_new_tokens=12', '--stop=\n']
  assert cli.main(argv) == 0
  (sample,) = json.loads(capsys.readouterr().out)['samples']
  answer = sample['text'].strip()
  rows = [dict(prompt='Sea ', answer=answer), dict(prompt='Sea', answer='?')]
  code, out, _ = run({'m.jsonl': rows}, '--max_new_tokens=12', '--mesh=data=8')
  assert answer and code == 0
  line = out.splitlines()[1].split()
  assert line == ['m.jsonl', 'match', '2', 'exact_match', '0.5000', '0.5000']


def test_long_prompts_are_cut_and_counted(run):
  rows = [dict(prompt='w' * 40, choices=['a', 'b'], answer=0), QUIZ[1]]
  code, _, err = run({'q.jsonl': rows})
  assert code == 0 and 'q.jsonl: 1 of 2 prompts' in err[-1]
  assert '32 tokens' in err[-1] and 'cut from the left' in err[-1]
  rows = [dict(prompt='w' * 40, answer='a')]
  code, _, err = run({'m.jsonl': rows}, '--max_new_tokens=8')
  assert code == 0 and 'm.jsonl: 1 of 1 prompts' in err[-1]
  assert not any('exact matches end' in line for line in err)
  code, _, err = run({'a.txt': 'x', 'm.jsonl': rows})  # rows of 32
  assert code == 0 and 'exact matches end after 16 tokens' in '\n'.join(err)


def test_experts_drop_nothing(run, made, tmp_path, monkeypatch):
  """A row's numbers depend on no other row, whatever training may drop."""
  from paraxis.decode import load

  asked = []

  def parts(self, config, *_):
    asked.append(config.model.experts.capacity_factor)
    raise KeyboardInterrupt

  saved = load.Checkpoint.config

  def config(self):
    found = saved(self)
    found.model.experts.capacity_factor = 1.0
    return found

  monkeypatch.setattr(load.Checkpoint, 'config', config)
  monkeypatch.setattr(load.Checkpoint, 'parts', parts)
  assert run({'a.txt': 'x'})[0] == 130 and asked == [0.0]


ONE = dict(prompt='a', choices=['b', 'c'], answer=0)


@pytest.mark.parametrize(
  'files, flags, words',
  [
    ({}, [], ['--tasks=FILE']),
    ({'a.csv': 'x'}, [], ['a.csv', "'.csv'", '.jsonl, .txt and .md']),
    ({'a.txt': ''}, [], ['a.txt is empty']),
    ({'a.jsonl': '\n'}, [], ['a.jsonl holds no row']),
    ({'a.jsonl': '{"prompt"'}, [], ['a.jsonl:1: not JSON']),
    ({'a.jsonl': '3\n'}, [], ['a.jsonl:1', '"answer"', 'none']),
    ({'a.jsonl': '[' * 10**5}, [], ['a.jsonl:1: not JSON', 'recursion']),
    ({'a.jsonl': r'{"text": "a\ud800b"}'}, [], ["a.jsonl:1: '\\ud800'"]),
    (
      {'a.jsonl': [ONE, ONE | dict(choices=['b', '\udc01'])]},
      [],
      ["a.jsonl:2: '\\udc01'"],
    ),
    (
      {'a.jsonl': [ONE | dict(prompt='\ud83d')]},
      [],
      ['a.jsonl:1', 'surrogates'],
    ),
    ({'a.txt': 'x'}, ['--stop='], ['--stop= is empty']),
    (
      {'a.jsonl': [ONE, dict(prompt='a', choices=['b', 'c'])]},
      [],
      ['a.jsonl:2', "its keys are 'prompt', 'choices'", '"answer"'],
    ),
    (
      {'a.jsonl': [ONE | dict(answer=2)]},
      [],
      ['a.jsonl:1: "answer" is 2', '2 choices', '0 to 1'],
    ),
    ({'a.jsonl': [ONE | dict(answer='b')]}, [], ["is 'b'", '0 to 1']),
    ({'a.jsonl': [ONE | dict(choices=['b', ''])]}, [], ['choices[1]', 'empty']),
    ({'a.jsonl': [ONE | dict(choices=['b'])]}, [], ['two texts']),
    ({'a.jsonl': [ONE | dict(prompt=3)]}, [], ['a.jsonl:1: "prompt"']),
    ({'a.jsonl': [dict(question='a', answer=' ')]}, [], ['"answer"', 'empty']),
    ({'a.jsonl': [ONE, dict(text='a')]}, [], ['a.jsonl:2', 'text', 'choice']),
    ({'a.txt': 'x'}, ['--step=4'], ['no checkpoint of step 4']),
    ({'a.txt': 'x'}, ['--domain=sea'], ["no domain 'sea'"]),
    ({'a.txt': 'x'}, ['--batch_size=0'], ['batch_size']),
    (
      {'a.jsonl': [ONE | dict(choices=['b', 'c' * 40])]},
      [],
      ['a.jsonl:1: choices[1]', '41 tokens', '32'],
    ),
    (
      {'a.jsonl': [dict(prompt='a', answer='b')]},
      ['--max_new_tokens=32'],
      ['max_new_tokens=32', '32 tokens'],
    ),
    (
      {'a.txt': 'x'},
      ['--config.model.latent.rotation=hadamard', '--config.model.pattern=A'],
      ['model.latent', 'leave them out'],
    ),
    ({'a.txt': 'x'}, ['--json=none/a.json'], ['--json=none/a.json']),
  ],
)
def test_bad_input_is_one_line(run, files, flags, words):
  code, out, err = run(files, *flags)
  assert (code, out) == (2, '')
  assert all(word in err[-1] for word in words), err
  assert sum('Traceback' in line for line in err) == 0


def test_figures_are_not_lost(run, monkeypatch):
  """A folder is no file, which is said at once; what fails later has a table
  before it."""
  code, out, err = run({'a.txt': 'x'}, '--json=.')
  assert (code, out, len(err)) == (2, '', 1) and '--json=. is a folder' in err[
    0
  ]

  def full(*_, **more):
    raise OSError('No space left on device')

  monkeypatch.setattr(command.pathlib.Path, 'write_text', full)
  code, out, err = run({}, '--tasks=a.txt', '--json=out.json')
  assert code == 2 and '--json=out.json: No space left' in err[-1]
  assert 'bits_per_byte' in out


def test_a_side_network_is_refused_before_any_score(run, tmp_path, monkeypatch):
  """One task of several needs texts that it cannot make."""
  config = schema.view({
    'model': SIZES, 'train': dict(side=4),
    'data': dict(tokenizer='bytes', sequence_length=32),
  })  # fmt: skip
  built, params = support.untrained(config)
  path = support.save_run(tmp_path / 'side', config, built, params)
  scored = []

  def rolling(self, texts, first):
    scored.append(texts)
    return [(-1.0, 1)] * len(texts)

  monkeypatch.setattr(score.Scorer, 'rolling', rolling)
  files = {'a.txt': 'x', 'm.jsonl': [dict(prompt='Sea', answer='?')]}
  model = (f'--checkpoint={path}',)
  code, out, err = run(files, model=model)
  assert (code, out, scored) == (2, '', []) and 'train.side=4' in err[-1]
  assert run({'a.txt': 'x'}, model=model)[0] == 0 and scored


def test_one_model_is_named(run, made):
  both = (f'--checkpoint={made[0]}', '--weights=none')
  for model in ((), both):
    code, _, err = run({'a.txt': 'x'}, model=model)
    assert code == 2 and len(err) == 1 and 'one of the two' in err[0]
  code, _, err = run({'a.txt': 'x'}, model=('--weights=none',))
  assert code == 2 and 'none: no such folder' in err[-1]
  code, _, err = run({}, '--tasks=gone.txt')
  assert code == 2 and '--tasks=gone.txt' in err[-1]


def test_standard_errors_are_those_of_the_books():
  """Of a mean; a ratio of constant parts has none."""
  values = [1.0, 0.0, 1.0, 1.0]
  mean, error = tasks._mean(values)
  assert mean == 0.75 and error is not None
  assert error == pytest.approx(np.std(values, ddof=1) / 2)
  assert tasks._ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]) == (2.0, 0.0)
  assert tasks._ratio([2.0], [4.0]) == (0.5, None)
  # Jackknife, to first order, as another way to the same.
  rng = np.random.default_rng(0)
  below = rng.uniform(5, 15, 200)
  above = 2 * below + rng.normal(size=200)
  ratio, error = tasks._ratio(list(above), list(below))
  assert ratio == pytest.approx(above.sum() / below.sum())
  without = (above.sum() - above) / (below.sum() - below)
  jackknife = math.sqrt(199 * np.var(without))
  assert error == pytest.approx(jackknife, rel=0.02)
