"""The decode command on a saved checkpoint: what users type, and mistype."""

import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys

import jax
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.decode import __main__ as command
from paraxis.decode import load
from paraxis.decode import loop
from paraxis.models.text import tokenizer
from paraxis.sharding.meter import compiling

TINY = dict(
  vocab_size=2048,
  d_model=16,
  num_layers=1,
  num_heads=2,
  d_ff=32,
  embedding_init_std=1.0,
  tied_embedding=False,
)


def save(path, steps, **mesh):
  """A run of that mesh in a workdir; its parameters are always the same."""
  config = schema.view(
    {'model': TINY, 'mesh': mesh, 'decode': dict(max_new_tokens=6)}
  )
  built, params = support.untrained(config)
  return support.save_run(path, config, built, params, steps)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A run with steps 3 and 7; its mesh has 4 of the 8 devices here."""
  return save(tmp_path_factory.mktemp('run'), (3, 7), data=2, tensor=2)


@pytest.fixture
def run(capsys, workdir):
  """run(*flags) -> (exit code, stdout, lines of stderr)."""

  def call(*flags, checkpoint=workdir):
    argv = [f'--checkpoint={checkpoint}', *flags]
    code = command_line.run(command.main, argv)
    out, err = capsys.readouterr()
    return code, out, err.splitlines()

  call.path = workdir
  return call


def test_json_is_the_same_twice_and_on_another_mesh(run):
  flags = ('--prompt=The ', '--domain=drama', '--temperature=0', '--json')
  code, out, err = run(*flags)
  assert code == 0
  assert any('blanks at the end of 1 of 1' in line for line in err)
  assert any('mesh data=2,tensor=2, here are 8' in line for line in err)
  found = json.loads(out)
  (sample,) = found['samples']
  assert found['step'] == 7 and sample['prompt'] == 'The'
  assert sample['domain'] == 'drama' and sample['finish'] == 'length'
  assert len(sample['tokens']) == 6
  decoded = tokenizer.load('bpe2048').decode(sample['tokens'])
  assert sample['text'] == decoded
  assert run(*flags)[1] == out
  assert run(*flags, '--mesh=data=2,fsdp=2,tensor=2')[1] == out
  other = run('--prompt=The', '--domain=code', *flags[2:])[1]
  assert json.loads(other)['samples'][0]['tokens'] != sample['tokens']


def test_results_are_utf8_whatever_the_locale_says(run, monkeypatch):
  flags = ['--prompt=Ночь', '--domain=drama', '--temperature=0', '--json']
  want = run(*flags)[1]
  stdout = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
  monkeypatch.setattr('sys.stdout', stdout)
  argv = [f'--checkpoint={run.path}', *flags]
  assert command_line.run(command.main, argv) == 0
  assert 'Ночь' in want and stdout.buffer.getvalue().decode() == want


def test_prompts_that_share_rows(run, tmp_path):
  """On a mesh whose devices do not shard them; the texts stay the same."""
  file = tmp_path / 'prompts.txt'
  file.write_text('One\nTwo\nThree and more\n', 'utf-8')
  flags = (
    f'--prompts_file={file}',
    '--json',
    '--domain=drama',
    '--temperature=0',
  )
  want = json.loads(run(*flags)[1])['samples']
  code, out, err = run(*flags, '--requests=2')
  keys = ('prompt', 'text', 'tokens', 'finish')
  same = lambda samples: [[s[k] for k in keys] for s in samples]
  assert code == 0 and same(json.loads(out)['samples']) == same(want)
  text = '\n'.join(err)
  assert 'decoding with data=1 on 1 of them' in text
  assert '3 prompts for 2 rows (decode.requests): 1 wait' in text
  code, out, err = run(*flags, '--requests=2', '--mesh=data=8')
  assert (code, out) == (2, '') and 'data would shard them' in err[-1]
  drafts = '--method=prompt_lookup', '--mesh=data=8'
  code, out, err = run(*flags, '--requests=8', *drafts)
  assert code == 0 and same(json.loads(out)['samples']) == same(want)
  code, out, err = run(*flags, '--requests=3', *drafts)
  assert (code, out) == (2, '') and '3 rows on 8 batch shards' in err[-1]


@pytest.mark.parametrize(
  'decode, line',
  [
    (dict(requests=8, method='prompt_lookup'), ', on data=8'),
    (
      dict(requests=3, method='prompt_lookup'),
      'data=1 on 1 of them (--mesh= names another); decode.requests=3 rows on '
      '8 batch shards',
    ),
    (
      dict(requests=8),
      'data=1 on 1 of them (--mesh= names another); decode.requests=8 rows are '
      'shared by all prompts',
    ),
  ],
)
def test_the_mesh_of_a_run_shards_shared_rows_that_it_may(
  tmp_path, decode, line
):
  """And a line says why it may not."""
  said, run = [], save(tmp_path, (1,), data=8)
  with load.Checkpoint(run, say=said.append) as opened:
    config = opened.config()
    config.decode.update(decode)
    opened.parts(schema.view(config))
  assert line in '\n'.join(said)
  assert len(said) == 1 + ('on 1 of' in line)


@pytest.mark.parametrize('more', ((), ('--requests=2',), ('--drafts=2',)))
def test_each_result_is_printed_when_it_ends(run, tmp_path, more):
  """A line each, numbered as the prompts are; those of one object for all."""
  file = tmp_path / 'prompts.txt'
  file.write_bytes(b'One\n\xff\nTwo and more\nThree\n')
  flags = [f'--prompts_file={file}', '--domain=drama', '--temperature=0', *more]
  if '--drafts=2' in more:
    flags.append('--method=prompt_lookup')
  code, out, _ = run(*flags, '--json')
  want = json.loads(out)['samples']
  code, out, err = run(*flags, '--stream')
  assert code == 2 and any('line 2 is left out' in line for line in err)
  found = [json.loads(line) for line in out.splitlines()]
  assert sorted(r.pop('index') for r in found) == [0, 2, 3]
  order = lambda samples: sorted(samples, key=lambda s: s['prompt'])
  assert order(found) == order(want)
  assert any('3 texts: 15 tokens after the first' in line for line in err)


def test_ended_texts_do_not_wait_for_longer_ones(run):
  made = run_generator(run)
  seen = []

  def ended(i, result):
    seen.append((i, result['finish'], len(result['tokens'])))

  first = made.generate(['One', 'Two'], ['drama'] * 2, **LONG)
  stop = first[1]['text'][4:7]
  assert stop not in first[0]['text']
  found = made.generate(
    ['One', 'Two'], ['drama'] * 2, (stop,), on_end=ended, **LONG
  )
  assert [i for i, _, _ in seen] == [1, 0] and seen[0][1] == 'stop'
  assert found[0]['tokens'] == first[0]['tokens']


def test_a_method_says_how_many_tokens_a_call_made(run):
  flags = ('--prompt=The', '--domain=drama', '--temperature=0', '--json')
  want = json.loads(run(*flags)[1])['samples'][0]['tokens']
  code, out, err = run(*flags, '--method=prompt_lookup', '--drafts=2')
  sample = json.loads(out)['samples'][0]
  assert code == 0 and sample['tokens'] == want
  made = f'5 tokens after the first in {sample["calls"]} calls of the model, '
  assert any(made in line for line in err)
  code, out, err = run(*flags, '--method=speculative')
  assert (code, out) == (2, '') and 'draft_layers=0 of 1' in err[-1]


LONG = dict(temperature=0.0, max_new_tokens=40)


def run_generator(run):
  """loop.Generator of the run."""
  with load.Checkpoint(run.path, say=lambda line: None) as opened:
    return opened.generator(schema.view(opened.config()))


@pytest.mark.parametrize('shift', [False, True])
def test_prompts_of_masked_models_begin_as_their_rows_do(
  capsys, tmp_path, shift
):
  """With the first token of a document, or without: it was never an input."""
  model = TINY | dict(visibility='full', mask_id=2047, mask_shift=shift)
  decode = dict(max_new_tokens=6, temperature=0.0, method='unmask')
  train = dict(objective='masked')
  config = schema.view(dict(model=model, decode=decode, train=train))
  built, params = support.untrained(config)
  path = support.save_run(tmp_path, config, built, params)

  def call(*flags):
    flags = f'--checkpoint={path}', '--prompt=The KING', '--json', *flags
    return command_line.run(command.main, flags), *capsys.readouterr()

  code, out, _ = call()
  (sample,) = json.loads(out)['samples']
  with load.Checkpoint(path, say=lambda line: None) as opened:
    made = opened.generator(config)
  vocabulary = made.tokenizer
  ids = vocabulary.encode('The KING')
  both = made.generate([ids, [vocabulary.bos_id(), *ids]])
  assert both[0]['tokens'] != both[1]['tokens']
  assert code == 0 and sample['tokens'] == both[shift]['tokens']
  code, _, err = call('--domain=drama')
  if shift:
    assert code == 0
  else:
    last = err.splitlines()[-1]
    assert code == 2 and "domain 'drama'" in last and 'mask_shift' in last


TRAINED = {
  'context': dict(context=8, context_form='rsa', zero=1),
  'rings': dict(
    data=4, tensor=2, zero=3, collectives='explicit', collective_matmul='all'
  ),
}


@pytest.mark.parametrize('name', TRAINED)
def test_how_a_run_was_laid_out_does_not_matter(run, tmp_path, name):
  """What only training has is left out; another mesh is reported."""
  flags = ('--prompt=The ', '--domain=drama', '--temperature=0', '--json')
  want = json.loads(run(*flags)[1])['samples']
  save(tmp_path, (3,), **TRAINED[name])
  code, out, err = run(*flags, checkpoint=tmp_path)
  assert code == 0 and json.loads(out)['samples'] == want
  text = '\n'.join(err)
  if name == 'context':
    assert 'the run used mesh context=8, here are 8 devices' in text
    assert 'decoding with data=1 on 1 of them' in text
    code, out, err = run(*flags, '--mesh=context=8', checkpoint=tmp_path)
    assert code == 0 and json.loads(out)['samples'] == want  # shares slots
    code, out, err = run(*flags, '--mesh=stage=8', checkpoint=tmp_path)
    assert (code, out) == (2, '') and 'nothing for stage to share' in err[-1]
  else:
    assert 'the run used' not in text and 'on data=4,tensor=2' in text


def test_flags_override_the_configuration(run, tmp_path):
  file = tmp_path / 'prompts.txt'
  file.write_text('One\n\nTwo\n', 'utf-8')
  code, out, err = run(
    f'--prompts_file={file}',
    '--json',
    '--config.decode.max_new_tokens=3',
    '--config.decode.temperature=0',
    '--domain=drama',
    '--domain=code',
    '--mesh=data=2,fsdp=2,tensor=2',
  )
  samples = json.loads(out)['samples']
  assert code == 0 and [s['prompt'] for s in samples] == ['One', 'Two']
  assert [s['domain'] for s in samples] == ['drama', 'code']
  assert [len(s['tokens']) for s in samples] == [3, 3]
  assert any('1 empty lines' in line for line in err)
  code, out, _ = run(
    '--prompt=One',
    '--domain=drama',
    '--temperature=0',
    '--json',
    '--config.decode.max_new_tokens=3',
    '--config.decode.temperature=2',
  )
  assert json.loads(out)['samples'][0]['tokens'] == samples[0]['tokens']


def test_text_and_streaming_are_the_same(run, monkeypatch):
  flags = ('--prompt=The', '--seed=5', '--max_new_tokens=20')
  code, out, _ = run(*flags)
  assert code == 0 and out.startswith('The') and out.endswith('\n')
  monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
  assert run(*flags)[1] == out


def test_logits_that_are_not_finite_exit_with_14(run, monkeypatch):
  """What was streamed stays; one line names row and step."""
  flags = ('--prompt=The', '--temperature=0', '--max_new_tokens=20')
  (sample,) = json.loads(run(*flags, '--json')[1])['samples']
  ids, text = sample['tokens'], tokenizer.load('bpe2048')
  bad = next(t for t in ids if t not in text.encode('The'))
  step = ids.index(bad) + 1
  prepare = loop.Generator._prepare

  def poisoned(self, params):
    out = prepare(self, params)
    return out | {'embedding': out['embedding'].at[bad].set(float('nan'))}

  monkeypatch.setattr(loop.Generator, '_prepare', poisoned)
  code, out, err = run(*flags, '--json')
  assert (code, out) == (14, '') and f'row 0 at step {step} ' in err[-1]
  monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
  code, out, err = run(*flags)
  assert code == 14 and out == f'The{text.decode(ids[:step])}\n'
  assert f'row 0 at step {step} are not finite' in err[-1]
  assert 'Traceback' not in '\n'.join(err)


def test_any_folder_of_a_run(run, workdir):
  flags = ('--prompt=a', '--json', '--max_new_tokens=1')
  steps = workdir / 'checkpoints'
  for path, step in ((steps, 7), (steps / '3', 3)):
    code, out, _ = run(*flags, checkpoint=path)
    assert code == 0 and json.loads(out)['step'] == step
  assert json.loads(run(*flags, '--step=3')[1])['step'] == 3


@pytest.mark.parametrize('whole', [False, True])
def test_damage_falls_back_and_is_reported(run, workdir, tmp_path, whole):
  copy = tmp_path / 'copy'
  shutil.copytree(workdir, copy)
  for step in (3, 7) if whole else (7,):
    files = (copy / 'checkpoints' / str(step) / 'state').rglob('*')
    largest = max(
      (f for f in files if f.is_file()), key=lambda f: f.stat().st_size
    )
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 16
    largest.write_bytes(data)
  code, out, err = run('--prompt=a', '--json', checkpoint=copy)
  assert any('7 is damaged' in line and 'older' in line for line in err)
  if whole:
    assert code == 14 and not out and 'all 2 checkpoints' in err[-1]
  else:
    assert code == 0 and json.loads(out)['step'] == 3


@pytest.mark.fault(39)
@pytest.mark.parametrize(
  'flags, words',
  [
    (['--domain=drma'], "no domain 'drma'.*Did you mean 'drama'"),
    (['--domain=code', '--domain=drama'], '2 --domain flags for 1 prompts'),
    (['--temperature=-1'], 'temperature=-1.0'),
    (['--top_k=2049'], 'top_k=2049 is out of range'),
    (['--max_new_tokens=1023'], '1025, beyond decode.cache_length=1024'),
    (['--max_new_tokens=0'], 'max_new_tokens=0'),
    (['--max_new_tokens=x'], 'max_new_tokens'),
    (['--stop='], 'empty stop string'),
    (['--promt=x'], "'--promt=x'.*Did you mean --prompt"),
    (['stray'], "unexpected argument 'stray'"),
    (['--config=quickstart'], 'from the checkpoint'),
    (['--config.decode.tempratur=1'], "Did you mean 'decode.temperature'"),
    (['--step=4'], 'no checkpoint of step 4.*there are 3, 7'),
    (['--mesh=data=3'], '3 devices, but 8'),
    (['--mesh=dta=8'], "'dta' is not a mesh axis"),
    (['--mesh=tensor=8'], "heads' has size 2"),
    (['--config.data.tokenizer=bytes'], 'not the one of the checkpoint'),
    (['--config.data.tokenizer=none.json'], 'neither one of'),
    (['--prompts_file=none.txt'], 'none.txt'),
    (['--prompt=a', '--json', '--stream'], '--stream prints'),
    (['--draft_layers=1'], 'draft_layers is .* easyspec, not autoreg'),
    (['--drafts=8'], 'decode.drafts is .*, ppd, not autoregressive'),
    (['--drafts=8', '--method=wavefront'], 'drafts is .*, not wavefront'),
    (
      ['--judge=typical', '--method=unmask', '--temperature=0'],
      'decode.judge is read by .*, ppd, not unmask',
    ),
    (
      ['--config.decode.unmask.tokens=2'],
      'decode.unmask.tokens is read by decode.method=unmask, not autoreg',
    ),
    (
      ['--method=speculative', '--config.decode.draft_group=1'],
      'draft_group is read by decode.method=easyspec, not speculative',
    ),
    (['--prompt=a', '--system=b'], 'first message of a --chat'),
    (['--prompt=a', '--chat', '--domain=drama'], 'leave out one of both'),
    (['--prompt=a', '--chat'], "tokenizer 'bpe2048' has none beside it"),
    (
      ['--lossless', '--judge=rejecton'],
      "judge='rejecton' is not one .* 'rejection'",
    ),
  ],
)
def test_bad_input_is_one_line(run, flags, words):
  code, out, err = run('--prompt=x', *flags)
  found = [line for line in err if re.search(words, line)]
  assert (code, out, len(found)) == (2, '', 1) and found[0] == err[-1]


@pytest.mark.parametrize(
  'flags', [['--json'], ['--stream'], ['--json', '--trace']], ids=' '.join
)
def test_a_conversation_prints_its_answers_alone(run, flags):
  code, out, err = run('--chat', *flags)
  assert (code, out, len(err)) == (2, '', 1)
  assert f'{flags[0]}: a --chat without prompts' in err[0]


def test_weights_of_another_program_have_no_steps(run):
  flags = '--weights=none', '--step=5', '--prompt=x'
  code, out, err = run(*flags, checkpoint='')
  assert (code, out) == (2, '')
  assert '--step=5: --weights=none are of another program' in err[-1]


def test_another_mesh_is_told_of_a_run_and_of_weights(run, monkeypatch):
  """Weights of another program had no run; one device is no plural."""
  said, config = [], schema.Config(mesh=schema.Mesh(data=2))
  one = jax.devices()[:1]
  for kind in (load.Checkpoint, load.Weights):
    opened = object.__new__(kind)
    opened._say = said.append
    opened._mesh(config, '', 1)
  monkeypatch.setattr(jax, 'devices', lambda: one)
  opened = object.__new__(load.Checkpoint)
  opened._say = said.append
  opened._mesh(config, '', 1)
  assert said == [
    'the run used mesh data=2, here are 8 devices: decoding with data=1 on 1 '
    'of them (--mesh= names another)',
    '8 devices, decoding on 1 (--mesh= names another)',
    'the run used mesh data=2, here is 1 device: decoding with data=1 on 1 of '
    'them (--mesh= names another)',
  ]


def test_bad_lines_are_named_and_the_others_run(run, tmp_path):
  file = tmp_path / 'prompts.txt'
  long = 'word ' * 1200
  file.write_bytes(b'One\n\nTw\xffo\n' + long.encode() + b'\nThree\n')
  flags = ('--json', '--domain=drama', '--temperature=0')
  code, out, err = run(f'--prompts_file={file}', *flags)
  samples = json.loads(out)['samples']
  assert code == 2 and [s['prompt'] for s in samples] == ['One', 'Three']
  said = [line for line in err if 'is left out' in line]
  assert 'prompts.txt, line 3 is left out: byte 2 is not UTF-8' in said[0]
  assert 'line 4' in said[1] and 'decode.cache_length=1024' in said[1]
  alone = json.loads(run('--prompt=Three', *flags)[1])['samples'][0]
  assert samples[1]['tokens'] == alone['tokens']
  file.write_bytes(b'\xff\n')
  code, out, err = run(f'--prompts_file={file}', *flags)
  assert (code, out) == (2, '') and 'no prompt is left of 1' in err[-1]


def test_bad_checkpoints(run, tmp_path):
  assert run('--prompt=x', checkpoint='')[0] == 2
  code, _, err = run('--prompt=x', checkpoint=tmp_path / 'none')
  assert code == 2 and 'no folder' in err[-1] and len(err) == 1
  code, _, err = run('--prompt=x', checkpoint=tmp_path)
  assert code == 2 and 'no checkpoint in' in err[-1] and len(err) == 1
  code, _, err = run()
  assert code == 2 and 'nothing to continue' in err[-1] and len(err) == 1


def test_another_architecture_lists_every_leaf(run):
  code, out, err = run(
    '--prompt=x', '--config.model.d_ff=64', '--config.model.qk_norm=head'
  )
  text = '\n'.join(err)
  assert code == 2 and not out and '5 of 14 leaves differ' in text
  for name in ('mlp/up', 'mlp/gate', 'mlp/down', 'query_norm', 'key_norm'):
    assert name in text
  assert 'saved float32(1, 16, 32), wanted float32(1, 16, 64)' in text
  assert 'optimizer' not in text


def test_help_is_complete_and_starts_no_jax():
  code = (
    'import sys\nfrom paraxis.decode import __main__ as m\n'
    'assert m.main(["--methods"]) == m.main(["--help"]) == 0\n'
    'assert "jax" not in sys.modules'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  own = [row[1] for row in command.COMMAND.flags if not isinstance(row, str)]
  own += ['config.model.dtype=bfloat16']
  for name in (*own, *(f.name for f in dataclasses.fields(schema.Decode))):
    assert name in done.stdout, name


def test_programs_are_kept_in_the_store(run, monkeypatch):
  asked = []
  monkeypatch.setattr(compiling, 'use_cache', lambda: asked.append(1))
  code, _, _ = run('--prompt=a', '--step=99')  # ends where it is opened
  assert code == errors.EXIT_USER and asked == [1]
