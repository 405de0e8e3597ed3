"""Every way to ask for a training that cannot be: one line, exit code 2.

Through the real command line: the line names what is wrong with both numbers,
nothing is compiled, and the workdir is as it was.
"""

import os

import jax
import pytest

from paraxis.train import cli
from paraxis.train import program as job_lib
from paraxis.train.run import compiling
from paraxis.train.run import workdir as workdir_lib

_compiled = []


def _count(event, seconds, **_):
  if event == '/jax/core/compile/backend_compile_duration':
    _compiled.append(seconds)


jax.monitoring.register_event_duration_secs_listener(_count)


def _tree(folder):
  files = (p for p in sorted(folder.rglob('*')) if p.is_file())
  return {p.relative_to(folder): p.read_bytes() for p in files}


@pytest.fixture
def refused(tiny, tmp_path, capsys, monkeypatch):
  """refused(argv, *words): the command fails as it should, saying words."""
  monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])
  monkeypatch.setenv('PARAXIS_CACHE', str(tmp_path / 'user_cache'))
  monkeypatch.setattr(compiling, 'use_cache', lambda: None)

  def check(argv, *words, workdir=tmp_path / 'run', code=2, lines=1):
    before, count = _tree(workdir), len(_compiled)
    capsys.readouterr()
    assert cli.main([str(a) for a in argv]) == code
    shown = capsys.readouterr().err
    assert shown.startswith('paraxis: ') and shown.count('\n') == lines, shown
    missing = [word for word in words if word not in shown]
    assert not missing, shown
    assert len(_compiled) == count, 'something was compiled'
    assert _tree(workdir) == before
    return shown

  return check


@pytest.fixture
def train(tiny, tmp_path, refused):
  """train(*flags): argv of a run of the tiny config."""

  def argv(*flags, config=tiny.file, workdir=tmp_path / 'run'):
    return ['train', f'--config={config}', f'--workdir={workdir}', *flags]

  return argv


def test_nothing_compiled_is_no_empty_promise():
  before = len(_compiled)
  jax.jit(lambda x: x * 3.25 + 1)(2.0)
  assert len(_compiled) > before


FLAGS = {
  'unknown key': (
    ['--config.train.stesp=3'],
    ['unknown config key train.stesp', "Did you mean 'train.steps'?"],
  ),
  'unknown section': (['--config.tain.steps=3'], ["'train.steps'?"]),
  'section': (['--config.train=3'], ['train is a section']),
  'no integer': (['--config.train.steps=many'], ['train.steps', 'many']),
  'fraction': (['--config.train.steps=1.5'], ['train.steps', '1.5']),
  'no boolean': (['--config.train.tensorboard=7'], ['train.tensorboard', '7']),
  'too small': (['--config.train.steps=0'], ['train.steps=0', 'value 1']),
  'too large': (
    ['--config.data.held_out_fraction=1.5'],
    ['held_out_fraction=1.5', '0.9'],
  ),
  'nan': (['--config.optimizer.learning_rate=nan'], ['learning_rate=nan']),
  'no choice': (
    ['--config.train.remat=ful'],
    ["train.remat='ful'", "Did you mean 'full'?"],
  ),
  'unknown flag': (['--wrokdir=x'], ['wrokdir']),
  'extra argument': (['more'], ["unexpected argument 'more'"]),
  'mesh product': (
    ['--mesh=data=3'],
    ['data=3 has 3 places for 8 devices', 'these fit: data=8'],
  ),
  'mesh of two axes': (
    ['--mesh=data=3,tensor=2'],
    ['6 places for 8 devices', 'data=2,tensor=4', 'data=4,tensor=2'],
  ),
  'mesh of the config': (
    ['--config.mesh.data=4'],
    ['data=4,fsdp=2,tensor=2', '16 places for 8 devices', 'data=2,fsdp=2'],
  ),
  'mesh axis': (['--mesh=modle=8'], ["'modle'"]),
  'mesh rest': (['--mesh=data=-1,fsdp=3'], ['3 places for 8 devices']),
  'mesh rules': (
    ['--config.mesh.rules=fdsp'],
    ["mesh.rules='fdsp'", "Did you mean 'fsdp'?"],
  ),
  'batch': (
    ['--config.train.batch_size=6'],
    ['train.batch_size=6', 'size 6', 'data=2 x fsdp=2', '(4 shards)'],
  ),
  'microbatches': (
    ['--config.train.microbatches=3'],
    ['train.batch_size=8', 'train.microbatches=3'],
  ),
  'microbatch rows': (
    ['--config.train.microbatches=4'],
    ['train.batch_size=8 in 4 microbatches', 'size 2', '(4 shards)'],
  ),
  'heads': (
    ['--config.model.num_heads=2', '--mesh=tensor=4,data=2'],
    ["heads' has size 2", 'tensor=4'],
  ),
  'mesh rules twice': (
    ['--config.mesh.rules=fsdp_tensor mlp=fsdp'],
    ["mesh axis 'fsdp' serves both", "'fsdp_tensor mlp=fsdp'"],
  ),
  'mesh rules of tokens twice': (
    ['--mesh=data=8', '--config.mesh.rules=data mlp=data'],
    ["mesh axis 'data' serves both", "'data mlp=data'"],
  ),
  'mesh rules logical': (
    ['--config.mesh.rules=fsdp_tensor vocb=tensor'],
    ["'vocb' is not a logical axis", "Did you mean 'vocab'?"],
  ),
  'mesh rules axis': (
    ['--config.mesh.rules=fsdp_tensor vocab=tensr'],
    ["'tensr' is not a mesh axis", "Did you mean 'tensor'?"],
  ),
  'zero': (['--config.mesh.zero=4'], ['mesh.zero=4', 'highest valid value 3']),
  'zero without a width': (
    ['--mesh=data=8', '--config.mesh.rules=data', '--config.mesh.zero=3'],
    ['mesh.zero=3', "the rules 'data'", 'fsdp_tensor'],
  ),
  'zero and width': (
    ['--mesh=data=8', '--config.mesh.zero=3', '--config.model.d_model=36']
    + ['--config.model.num_heads=2'],
    ["'embed' has size 36", 'data=8', 'nearest that does is 6'],
  ),
  'rings': (
    ['--config.mesh.collective_matmul=gate'],
    ["mesh.collective_matmul='gate'", "Did you mean 'gate_up'?"],
  ),
  'rings of nothing': (
    ['--mesh=data=8', '--config.mesh.collective_matmul=all'],
    ["mesh.collective_matmul='all'", 'tensor=1', 'mesh.sequence=True'],
  ),
  'collectives': (
    ['--config.mesh.collectives=explict'],
    ["mesh.collectives='explict'", "Did you mean 'explicit'?"],
  ),
  'explicit sums': (
    ['--config.mesh.collectives=explicit', '--config.mesh.sequence=False'],
    ["mesh.collectives='explicit'", 'tensor=2', 'mesh.sequence=True'],
  ),
  'context form': (
    ['--mesh=context=8', '--config.mesh.context_form=ulyses'],
    ["mesh.context_form='ulyses'", "Did you mean 'ulysses'?"],
  ),
  'context heads': (
    ['--mesh=context=8', '--config.mesh.context_form=ulysses'],
    ['4 heads', 'mesh.context=8', 'mesh.context_form=ring'],
  ),
  'context and tensor heads': (
    ['--mesh=context=4,tensor=2', '--config.mesh.context_form=ulysses'],
    ['2 heads of a tensor shard', 'mesh.context=4'],
  ),
  'heads and key heads': (
    ['--config.model.num_kv_heads=3'],
    ['model.num_heads=4', 'model.num_kv_heads=3'],
  ),
  'heads and width': (
    ['--config.model.num_heads=3'],
    ['model.d_model=32', 'model.num_heads=3'],
  ),
  'd_model': (
    ['--mesh=fsdp=8', '--config.model.d_model=36']
    + ['--config.model.num_heads=2'],
    ["'embed' has size 36", 'fsdp=8', 'nearest that does is 6'],
  ),
  'd_ff': (['--config.model.d_ff=63'], ["'mlp' has size 63", 'tensor=2']),
  'vocab': (
    ['--config.model.vocab_size=261'],
    ["'vocab' has size 261", 'tensor=2'],
  ),
  'sequence': (
    ['--mesh=data=4,tensor=2', '--config.data.sequence_length=63'],
    ['data.sequence_length=63', "'residual_length' has size 63", 'tensor=2'],
  ),
  'sequence and context': (
    ['--mesh=context=4,tensor=2', '--config.data.sequence_length=60']
    + ['--config.mesh.context_order=contiguous'],
    ['data.sequence_length=60', 'context=4 x tensor=2', '(8 shards)'],
  ),
  'sequence and zigzag': (
    ['--mesh=data=2,context=4', '--config.data.sequence_length=60'],
    ['data.sequence_length=60', 'mesh.context=4', 'zigzag', '56 and 64'],
  ),
  'stages': (
    ['--mesh=stage=8'],
    ['model.num_layers=2', 'mesh.stage=8 x pipeline.chunks=1'],
  ),
  'positions': (
    ['--config.model.position=learned', '--config.model.max_positions=32'],
    ['data.sequence_length is 64', 'model.max_positions=32'],
  ),
  'small vocabulary': (
    ['--config.model.vocab_size=256'],
    ['ids up to 258', 'model.vocab_size is 256', 'at least 259'],
  ),
  'another tokenizer': (
    ['--config.data.tokenizer=bpe2048'],
    ['ids up to 2047', 'model.vocab_size is 264'],
  ),
  'no tokenizer': (
    ['--config.data.tokenizer=byte'],
    ["'byte'", "Did you mean 'bytes'?"],
  ),
  'no data': (
    ['--config.data.path=no/such.txt'],
    ["data.path='no/such.txt'", 'no such file'],
  ),
  'no corpus': (['--config.data.path=corpus'], ['paraxis data fetch']),
  'small data': (
    ['--config.data.sequence_length=8192'],
    ['packs into ', 'fewer than train.batch_size=8'],
  ),
  'nothing held out': (
    ['--config.data.held_out_fraction=0'],
    ['are held out', 'held_out_fraction=0.0'],
  ),
  'mixture': (
    ['--config.data.mixture=sonk=2'],
    ["'sonk'", 'song', "Did you mean 'song'?"],
  ),
}


@pytest.mark.parametrize('what', FLAGS)
def test_flags(refused, train, tmp_path, what):
  flags, words = FLAGS[what]
  refused(train(*flags), *words)
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'argv, words',
  [
    (['trian'], ["'trian' is not a command", "Did you mean 'train'?"]),
    (['train'], ['--config is missing']),
    (['train', '--config=quickstart'], ['--workdir is missing']),
    (
      ['train', '--config.train.steps=3', '--workdir=W'],
      ['--config.x.y=value needs --config=FILE'],
    ),
    (
      ['train', '--config=no/such.py', '--workdir=W'],
      ['--config=no/such.py: no such file', 'quickstart'],
    ),
    (
      ['train', '--config=quikstart', '--workdir=W'],
      ["Did you mean 'quickstart'?"],
    ),
  ],
)
def test_commands(refused, argv, words):
  refused(argv, *words)


@pytest.mark.parametrize(
  'text, words',
  [
    ('x = 1\n', ['defines no get_config']),
    ('def get_config(:\n', ['SyntaxError', 'line 1']),
    ('def get_config():\n  return 1 / 0\n', ['ZeroDivisionError']),
    ('def get_config():\n  return {}\n', ['returns dict', 'ConfigDict']),
    ('import sys\nsys.exit("no\\nlines")\n', ['SystemExit', 'no lines']),
    (
      'def get_config():\n'
      '  from paraxis.configs import schema\n'
      '  config = schema.default()\n'
      '  with config.unlocked():\n'
      '    config.train.steps = "many"\n'
      '  return config\n',
      ["'steps'", 'int', 'many'],
    ),
  ],
)
def test_config_files(refused, train, tmp_path, text, words):
  file = tmp_path / 'mine.py'
  file.write_text(text)
  refused(train(config=file), *words)
  assert not (tmp_path / 'run').exists()


def _text(tmp_path, **files):
  folder = tmp_path / 'text'
  folder.mkdir()
  for name, text in files.items():
    (folder / name.replace('_', '.')).write_text(text)
  return folder


@pytest.mark.parametrize(
  'files, words',
  [
    ({}, ['0 .jsonl and .txt files']),
    (dict(a_txt=''), ['0 documents in 1 files']),
    (dict(a_jsonl='{"text": 3}\n'), ['a.jsonl:1', '"text"']),
    (dict(a_jsonl='{"text": "x"\n'), ['a.jsonl:1', 'not JSON']),
    (dict(a_jsonl='{"text": "x", "split": "tset"}\n'), ["'tset'", 'train']),
    (
      dict(a_jsonl='{"text": "sea", "split": "held"}\n'),
      ["0 of 1 documents are in split 'train'"],
    ),
    (
      dict(a_jsonl='{"text": "sea", "split": "train"}\n' * 99),
      ['packs into 7 rows of 64 tokens', 'train.batch_size=8'],
    ),
    (
      dict(a_jsonl='{"text": "sea", "split": "train"}\n' * 999),
      ['0 of 999 documents are held out'],
    ),
  ],
)
def test_texts(refused, train, tmp_path, files, words):
  folder = _text(tmp_path, **files)
  refused(train(f'--config.data.path={folder}'), *words)
  assert not (tmp_path / 'run').exists()


def test_a_token_id_beyond_the_vocabulary(refused, train, tmp_path):
  """A tokenizer of few entries, one of them far out."""
  tokenizers = pytest.importorskip('tokenizers')
  vocabulary = {'<unk>': 0, 'sea': 500}
  made = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(vocabulary, unk_token='<unk>')
  )
  made.add_special_tokens(['<s>', '</s>'])
  file = tmp_path / 'tokenizer.json'
  made.save(str(file))
  words = ['ids up to 50', 'model.vocab_size is 264', 'at least 50']
  refused(train(f'--config.data.tokenizer={file}'), str(file), *words)


def test_a_workdir_that_cannot_be_written(
  refused, train, tmp_path, monkeypatch
):
  (tmp_path / 'file').write_text('')
  monkeypatch.chdir(tmp_path)
  where = str(tmp_path / 'file' / 'run')  # a relative one is resolved
  refused(train(workdir='file/run'), '--workdir=file/run', where)


def test_two_runs_in_one_workdir(refused, train, tmp_path):
  held = workdir_lib.Lock(workdir_lib.prepare(tmp_path / 'run'))
  refused(train(), 'in use by another run', f'process {os.getpid()}')
  held.close()


@pytest.fixture(scope='module')
def finished(tiny, tmp_path_factory):
  """The workdir of a whole run."""
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  from paraxis.train import loop

  loop.run(tiny.config(), workdir, say=lambda line: None)
  return workdir


WIDER = ['--config.model.d_model=48', '--config.model.d_ff=96']


def test_a_workdir_of_another_config(refused, train, finished):
  refused(
    train(*WIDER, workdir=finished),
    'model.d_model was 32, is now 48',
    'model.d_ff was 64, is now 96',
    workdir=finished,
  )


def test_a_checkpoint_of_another_architecture(refused, train, finished):
  """Without its config the checkpoint itself says what differs, all of it."""
  config = finished / workdir_lib.CONFIG
  held = config.read_bytes()
  config.unlink()
  shown = refused(
    train(*WIDER, '--config.model.qk_norm=head', workdir=finished),
    'params/embedding',
    '(264, 32)',
    '(264, 48)',
    'params/layers/mlp/up',
    '(2, 32, 64)',
    '(2, 48, 96)',
    'params/layers/attention/key_norm',
    'optimizer/adamw/mu/norm/scale',
    '39 of 43 leaves differ',
    workdir=finished,
    lines=1 + 39,
  )
  config.write_bytes(held)
  assert shown.count('(264, 48)') == 3  # the parameter and two moments


def test_a_damaged_config(refused, train, finished):
  config = finished / workdir_lib.CONFIG
  held = config.read_bytes()
  config.write_bytes(held[:100])
  refused(
    train(workdir=finished), str(config), 'damaged', workdir=finished, code=14
  )
  config.write_bytes(held)


def test_a_corrupt_token_cache_is_built_again_and_said(tiny, tmp_path):
  config = tiny.config({'data.cache_dir': str(tmp_path)})
  job_lib.make(config, say=lambda line: None)
  (file,) = tmp_path.rglob('tokens.bin')
  good = file.read_bytes()
  bad = bytearray(good)
  bad[1000] ^= 4
  file.write_bytes(bad)
  said = []
  job_lib.make(config, say=said.append)
  assert 'tokens.bin does not match its checksum): building' in said[0]
  assert file.read_bytes() == good
  said.clear()
  job_lib.make(config, say=said.append)
  assert not [line for line in said if 'token cache' in line]


@pytest.mark.parametrize('packing', ['concat_split', 'first_fit'])
def test_documents_longer_than_a_row_are_cut_and_counted(tiny, packing):
  said = []
  job = job_lib.make(tiny.config({'data.packing': packing}), say=said.append)
  lengths = job.corpus.lengths[~job.corpus.held]
  assert (lengths > 65).all()
  text = f'data: {len(lengths)} documents are cut between rows of 64 tokens; '
  assert text + 'every token is used.' in said
  assert job.batches.plan.pairs == (lengths - 1).sum()
