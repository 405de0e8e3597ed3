"""lm-eval's requests, and lm-eval itself on tasks of local files, offline."""

import importlib
import json
import types

import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode.evaluate import harness
from paraxis.decode.evaluate import tasks

SIZES = dict(
  vocab_size=264, d_model=16, num_layers=1, num_heads=2, d_ff=32,
  embedding_init_std=1.0, tied_embedding=False,
)  # fmt: skip
ROWS = dict(
  quiz=[
    dict(prompt='Sea and', choices=['wind', 'the long sail', 'x'], answer=1),
    dict(prompt='Gull: ', choices=['aa', 'bcd'], answer=0),
    dict(prompt='w' * 40, choices=['north', 'over'], answer=1),
  ],
  match=[dict(prompt='Sea', answer='?'), dict(prompt='Salt', answer='*')],
  text=[dict(text='Rock and salt, ' * 4), dict(text='Calm')],
)
MORE = dict(
  quiz="""\
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: " "
metric_list:
  - metric: acc
""",
  match="""\
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["e"]
  max_gen_toks: 8
  do_sample: false
metric_list:
  - metric: exact_match
""",
  text="""\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
""",
)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return saved(tmp_path_factory.mktemp('run'))


def saved(path, **more):
  """A run of a small model in a workdir; more: sections of its config."""
  values = {
    'model': SIZES,
    'data': dict(tokenizer='bytes', sequence_length=32),
  }
  config = schema.view(values | more)
  built, params = support.untrained(config)
  return support.save_run(path, config, built, params)


@pytest.fixture(scope='module')
def model(workdir):
  return harness.Requests(checkpoint=str(workdir), batch_size='2', device=None)


def asked(*arguments):
  return [types.SimpleNamespace(args=args) for args in arguments]


def test_requests(model, capsys):
  """What lm-eval asks is what the scorer says, in the order of the requests."""
  pairs = [('Sea and', ' wind'), ('', 'x'), ('w' * 40, 'north'), ('a ', 'b')]
  wanted = model.scorer.continuations(pairs, [258])
  found = model.loglikelihood(asked(*pairs))
  assert found == [(s.nats, s.greedy) for s in wanted]
  assert '1 of 4 requests are longer than 32' in capsys.readouterr().err
  texts = [row['text'] for row in ROWS['text']]
  found = model.loglikelihood_rolling(asked(*[(text,) for text in texts]))
  sums = model.scorer.rolling(texts, [258])
  assert found == [nats for nats, _ in sums] and [n for _, n in sums] == [60, 4]
  found = model.generate_until(
    asked(
      ('Sea', dict(until=['\n\n'], max_gen_toks=4, do_sample=False)),
      ('Salt', dict(until='e', max_new_tokens=8, temperature=0.0)),
      ('w' * 40, dict(max_gen_toks=4)),
    )
  )
  assert '1 of 1 requests' in capsys.readouterr().err
  made = model.scorer._generator.generate
  greedy = dict(temperature=0.0)
  for text, prompt, new in zip(
    found, ('Sea', 'Salt', [119] * 28), (4, 8, 4), strict=True
  ):
    (one,) = made([prompt], max_new_tokens=new, **greedy)
    assert text == one['text'].split('e' if new == 8 else '\n\n')[0]


def test_rows_are_sharded_though_the_run_decodes_in_shared_ones(
  model, tmp_path, capsys
):
  decode, mesh = dict(requests=2), dict(data=8)
  path = str(saved(tmp_path, decode=decode, mesh=mesh))
  pairs = asked(('Sea and', ' wind'), ('Rock', 'and salt'))
  want = [nats for nats, _ in model.loglikelihood(pairs)]
  capsys.readouterr()
  for named in ('', 'data=8'):
    made = harness.Requests(checkpoint=path, mesh=named, batch_size='2')
    assert ', on data=8' in capsys.readouterr().err and made.scorer.rows == 8
    found = [nats for nats, _ in made.loglikelihood(pairs)]
    assert found == pytest.approx(want, abs=1e-4)


def test_a_context_may_begin_without_bos(workdir, model):
  plain = harness.Requests(checkpoint=str(workdir), add_bos_token=False)
  pairs = [('Sea and', ' wind'), ('', 'x')]
  ids = [(list(a.encode()), list(b.encode())) for a, b in pairs]
  ids[1] = ([258], ids[1][1])
  found = plain.loglikelihood(asked(*pairs))
  assert found == [(s.nats, s.greedy) for s in plain.scorer.scores(ids)]
  other = model.loglikelihood(asked(*pairs))
  assert abs(found[0][0] - other[0][0]) > 1e-3
  assert abs(found[1][0] - other[1][0]) < 1e-5


def test_what_is_refused(workdir, model):
  for options in (
    dict(do_sample=True), dict(temperature=0.7), dict(num_beams=10),
    dict(do_sample=False, num_beams=4),
  ):  # fmt: skip
    with support.refused('generate_until', f'{options}'):
      model.generate_until(asked(('a', options)))
  for options in (
    dict(do_sample=False, temperature=0.7, top_p=0.9), dict(num_beams=1),
    dict(num_beams=None, temperature=0), dict(do_sample=None),
  ):  # fmt: skip
    assert harness._generation(options) == (harness.NEW, ())
  with support.refused('generate_until', 'beams'):
    model.generate_until(asked(('a', dict(beams=3))))
  with support.refused('model_args', 'peft'):
    harness.Requests(checkpoint=str(workdir), peft='x')
  with support.refused('batch_size=auto'):
    harness.Requests(checkpoint=str(workdir), batch_size='auto')
  with support.refused('one of the two'):
    harness.Requests()


def test_without_lm_eval_it_says_what_to_install(monkeypatch):
  def absent(name):
    raise ImportError(f'No module named {name!r}')

  monkeypatch.setattr(importlib, 'import_module', absent)
  with pytest.raises(errors.UserError, match=r'paraxis\[lm-eval\]'):
    harness.register()


@pytest.mark.lm_eval
# What it imports warns of its own deprecations.
@pytest.mark.filterwarnings('ignore')
def test_lm_eval_on_local_files(workdir, tmp_path, monkeypatch):
  """Three kinds of tasks: the figures of `paraxis evaluate`."""
  pytest.importorskip('lm_eval', reason='lm-eval not installed ([lm-eval])')
  monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
  evaluator = importlib.import_module('lm_eval.evaluator')
  index = importlib.import_module('lm_eval.tasks')
  for name, rows in ROWS.items():
    file = tmp_path / f'{name}.jsonl'
    file.write_text(''.join(f'{json.dumps(row)}\n' for row in rows), 'utf-8')
    text = support.LM_EVAL_TASK.format(name=name, file=file, more=MORE[name])
    (tmp_path / f'{name}.yaml').write_text(text, 'utf-8')
  made = harness.register()
  assert made is harness.register()
  found = evaluator.simple_evaluate(
    model='paraxis',
    model_args=dict(checkpoint=str(workdir), mesh='data=8'),
    tasks=[f'paraxis_{name}' for name in ROWS],
    task_manager=index.TaskManager(include_path=str(tmp_path)),
    bootstrap_iters=0,
  )
  model = harness.Requests(checkpoint=str(workdir), batch_size=2)
  results, samples = found['results'], found['samples']

  def ours(name, **options):
    task = tasks.read(str(tmp_path / f'{name}.jsonl'))
    return tasks.run(task, model.scorer, **options)

  quiz = ours('quiz')
  assert results['paraxis_quiz']['acc,none'] == quiz.metrics['acc'][0]
  for sample, example in zip(
    samples['paraxis_quiz'], quiz.examples, strict=True
  ):
    # lm-eval puts a blank between 'Gull: ' and its choices, we do not.
    if not sample['doc']['prompt'].endswith(' '):
      nats = [float(pair[0]) for pair in sample['filtered_resps']]
      assert nats == pytest.approx(example['nats'], abs=1e-4)
  match = ours('match', new=8, stop=('e',))
  texts = [sample['filtered_resps'][0] for sample in samples['paraxis_match']]
  assert texts == [example['text'] for example in match.examples]
  bits = ours('text').metrics['bits_per_byte'][0]
  theirs = results['paraxis_text']['bits_per_byte,none']
  assert theirs == pytest.approx(bits, abs=1e-5)
