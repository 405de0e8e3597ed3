"""Every way to ask for a training that cannot be: one line, exit code 2.

Through the real command line: the line names what is wrong with both numbers,
nothing is compiled, and the workdir is as it was.
"""

import os
import pathlib
import shutil

import jax
import pytest
import support

from paraxis.train import cli
from paraxis.train.run import metrics
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
def refused(tiny, tmp_path, capsys, settings_stay):
  """refused(argv, *words): the command fails as it should, saying words."""

  def check(argv, *words, workdir=tmp_path / 'run', code=2, lines=1):
    before, count = _tree(workdir), len(_compiled)
    capsys.readouterr()
    assert cli.main([str(a) for a in argv]) == code
    shown = capsys.readouterr().err
    assert shown.startswith('paraxis: ') and shown.count('\n') == lines, shown
    missing = [word for word in words if word not in shown]
    assert not missing, shown
    assert len(_compiled) == count, 'something was compiled'
    after, events = _tree(workdir), pathlib.Path('events.jsonl')
    # A start that fails is one, and its ledger says so.
    assert after.pop(events, b'').startswith(before.pop(events, b''))
    assert after == before
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


# Flags of a run of the tiny config, without dashes | words of the line | ...
FLAGS = """\
train.stesp=3 | unknown config key train.stesp | Did you mean 'train.steps'?
tain.steps=3 | 'train.steps'?
train.steps=many | train.steps | many
train.steps=1.5 | train.steps | 1.5
train.tensorboard=7 | train.tensorboard | 7
train.steps=0 | train.steps=0 | value 1
data.held_out_fraction=1.5 | held_out_fraction=1.5 | 0.9
optimizer.learning_rate=nan | learning_rate=nan
train.remat=ful | train.remat='ful' | Did you mean 'full'?
mesh=data=3 | data=3 needs 3 devices, but 8 | these fit: data=8
mesh=data=3,tensor=2 | 6 devices, but 8 | data=2,tensor=4
    | data=4,tensor=2
mesh.data=4 | data=4,fsdp=2,tensor=2 | 16 devices, but 8 | data=2,fsdp=2
mesh=modle=8 | 'modle'
mesh=data=-1,fsdp=3 | a multiple of 3 devices, but 8
mesh.rules=fdsp | mesh.rules='fdsp' | Did you mean 'fsdp'?
train.batch_size=6 | train.batch_size=6 | size 6 | data=2 x fsdp=2 | (4 shards)
mesh=replica=2,data=4, train.batch_size=12, outer.exchange=mean, outer.period=2
    | train.batch_size=12 | size 12 | replica=2 x data=4 | (8 shards)
mesh=stage=2,data=4, train.microbatches=131072 | microbatches=262144 + stages
train.microbatches=3 | train.batch_size=8 | train.microbatches=3
train.microbatches=4 | train.batch_size=8 in 4 microbatches | size 2
    | (4 shards)
model.num_heads=2, mesh=tensor=4,data=2 | layers/attention/ | heads' has size 2
    | tensor=4 | 4 shards
mesh.rules=fsdp_tensor mlp=fsdp | mesh axis 'fsdp' serves both
    | 'fsdp_tensor mlp=fsdp'
mesh=data=8, mesh.rules=data mlp=data | mesh axis 'data' serves both
    | 'data mlp=data'
mesh.rules=fsdp_tensor vocb=tensor | 'vocb' is not a logical axis
    | Did you mean 'vocab'?
mesh.rules=fsdp_tensor vocab=tensr | 'tensr' is not a mesh axis
    | Did you mean 'tensor'?
mesh.zero=4 | mesh.zero=4 | highest valid value 3
mesh=data=8, mesh.rules=data, mesh.zero=3 | mesh.zero=3 | the rules 'data'
    | fsdp_tensor
mesh=data=8, mesh.zero=3, model.d_model=36, model.num_heads=2
    | 'embed' has size 36 | data=8 | nearest that does is 6
mesh.collective_matmul=gate | mesh.collective_matmul='gate'
    | Did you mean 'gate_up'?
mesh=data=8, mesh.collective_matmul=all | mesh.collective_matmul='all'
    | tensor=1 | mesh.sequence=True
mesh.collectives=explict | mesh.collectives='explict' | Did you mean 'explicit'?
mesh.collectives=explicit, mesh.sequence=False | mesh.collectives='explicit'
    | tensor=2 | mesh.sequence=True
mesh=context=8, mesh.context_form=ulyses | mesh.context_form='ulyses'
    | Did you mean 'ulysses'?
mesh=context=8, mesh.context_form=ulysses | 4 heads | mesh.context=8
    | mesh.context_form=ring
mesh=context=4,tensor=2, mesh.context_form=ulysses | 2 heads of a tensor shard
    | mesh.context=4
model.num_kv_heads=3 | model.num_heads=4 | model.num_kv_heads=3
model.num_heads=3 | model.d_model=32 | model.num_heads=3 | model.head_dim
mesh=fsdp=8, model.d_model=36, model.num_heads=2 | 'embed' has size 36 | fsdp=8
    | nearest that does is 6
model.d_ff=63 | layers/mlp/ | 'mlp' has size 63 | tensor=2
model.vocab_size=261 | embedding: 'vocab' has size 261 | tensor=2
mesh=data=4,tensor=2, data.sequence_length=63 | data.sequence_length=63
    | 'residual_length' has size 63 | tensor=2
mesh=context=4,tensor=2, mesh.context_order=contiguous, data.sequence_length=60
    | data.sequence_length=60 | context=4 x tensor=2 | (8 shards)
mesh=data=2,context=4, data.sequence_length=60 | data.sequence_length=60
    | mesh.context=4 | zigzag | 56 and 64
mesh=stage=8 | model.num_layers=2 | mesh.stage=8 x pipeline.chunks=1
model.position=learned, model.max_positions=32 | data.sequence_length is 64
    | model.max_positions=32
model.vocab_size=256 | ids up to 258 | model.vocab_size is 256 | at least 259
data.tokenizer=bpe2048 | ids up to 2047 | model.vocab_size is 264
model.pattern=W | W layers | window=0
mesh.rules=data | 'data' | tensor=2
data.tokenizer=byte | 'byte' | Did you mean 'bytes'?
data.path=no/such.txt | data.path='no/such.txt' | no such file
data.path=corpus | paraxis data fetch
data.sequence_length=8192 | packs into | fewer than train.batch_size=8
data.held_out_fraction=0 | are held out | held_out_fraction=0.0
data.mixture=sonk=2 | 'sonk' | song | Did you mean 'song'?
"""


@pytest.mark.fault(30, 31, 32, 35)
@pytest.mark.parametrize(
  'row',
  FLAGS.replace('\n    |', ' |').splitlines(),
  ids=lambda row: row.split(' | ')[0],
)
def test_flags(refused, train, tmp_path, row):
  text, *words = row.split(' | ')
  dashes = lambda name: '--config.' if '.' in name else '--'
  flags = [dashes(f.partition('=')[0]) + f for f in text.split(', ')]
  refused(train(*flags), *words)
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('path', ['a' * 300, '~nobody_here/x.txt'])
def test_paths_that_no_system_looks_up(refused, train, path):
  """Too long a name, and the home of nobody, are as files that are missing."""
  refused(train(f'--config.data.path={path}'), 'no such file', path)
  sources = '--config.data.path=', f'--config.data.sources={path}:1'
  refused(train(*sources), 'no such file', path)
  words = 'nor a tokenizer.json file', path
  refused(train(f'--config.data.tokenizer={path}'), *words)
  template = f'--config.data.chat_template={path}'
  refused(train(template, '--config.data.path=no/such.txt'), 'no/such.txt')


def test_every_flag_that_names_a_path_knows_home():
  """Of one place; of a list each command expands the parts."""
  kinds = {
    f'{name} {row[1]}': row[0]
    for name, command in cli.COMMANDS.items()
    for row in command.flags
    if isinstance(row, tuple) and row[0] in (str, 'several', 'path', 'paths')
    if row[1].partition('=')[2] in ('FILE', 'FOLDER', 'PATH', 'RUN', 'RUN2')
  }
  assert len(kinds) > 20
  assert {kinds[n] for n in kinds} == {'path', 'paths'}, kinds


QUICK = ['train', '--config=quickstart']


@pytest.mark.parametrize(
  'argv, words',
  [
    (['trian'], ["'trian' is not a command", "Did you mean 'train'?"]),
    (['train'], ['--config is missing']),
    (QUICK, ['--workdir is missing']),
    ([*QUICK, '--workdir=W', '--wrokdir=x'], ['wrokdir']),
    ([*QUICK, '--workdir=W', 'more'], ["unexpected argument 'more'"]),
    (
      [*QUICK, '--workdir=W', 'train.steps=5'],
      ["argument 'train.steps=5'. Did you mean --config.train.steps=5?"],
    ),
    ([*QUICK, 'workdir=W'], ['Did you mean --workdir=']),
    (
      [*QUICK, '--train.steps=5'],
      ["'--train.steps=5'", 'Did you mean --config.train.steps=5?'],
    ),
    ([*QUICK, '--steps=5'], ['Did you mean --config.train.steps=5?']),
    ([*QUICK, '--steps', '5'], ['Did you mean --config.train.steps=VALUE?']),
    (
      [*QUICK, 'seed=5'],
      ['Did you mean --config.train.seed=5 or --config.decode'],
    ),
    (
      [*QUICK, '--d_ff=5'],
      [f'--config.model.{x}d_ff=5' for x in ('', 'experts.', 'hybrid.')],
    ),
    (['papers', '--steps=5'], ["unknown argument '--steps=5'"]),
    (['decode', '--checkpoint=W', 'wok'], ['Did you mean --prompt=wok?']),
    (['decode', '--chekpoint=W'], ['Did you mean --checkpoint?']),
    (
      ['checkpoint', 'import', 'x', '--config.data.tokenizer=bytes'],
      ['--config=FILE first. Did you mean --tokenizer=bytes?'],
    ),
    *(
      ([*QUICK, f'--workdir={root}', *more], ['is /, the root', 'such as /'])
      for root, more in (('/', []), ('/tmp/..', ['--devices=1']))
    ),
    (
      [*QUICK, '--workdir=W', '--config.optimizer.learning_rate=inf'],
      ['optimizer.learning_rate=inf is not a finite number'],
    ),
    (
      ['check', '--config=quickstart', '--config.model.vocab_size=10000000000'],
      ['10000000000 is above its highest valid value 2147483647'],
    ),
    (
      ['check', '--config=quickstart', '--config.model.num_layers=100000000'],
      ['model.num_layers=100000000 is above'],
    ),
    *(
      (
        ['check', '--config=quickstart', f'--config.{name}={value}'],
        [f'{name}={value} is above its highest valid value {most}'],
      )
      for name, value, most in (
        ('model.d_model', 10**10, 2**20),
        ('model.d_ff', 10**11, 2**20),
        ('model.experts.d_ff', 10**11, 2**20),
        ('model.num_heads', 10**8, 2**20),
        ('model.mamba.state', 10**9, 2**20),
        ('model.tcn.depth', 10**6, 64),
        ('model.gated_linear.value_expand', 1e30, 2**20),
        ('model.window', 2**31, 2**31 - 1),
        ('optimizer.warmup_steps', 3 * 10**9, 2**31 - 1),
        ('optimizer.learning_rate', 1e39, 3.4e38),
        ('checkpoint.host_bytes', 2**63, 2**63 - 1),
        ('decode.seed', 2**32, 2**32 - 1),
        ('data.sequence_length', 10**8, 2**24),
        ('data.sequence_length', 10**12, 2**24),
        ('decode.cache_length', 10**12, 2**24),
      )
    ),
    *(
      (
        [*command, '--config.data.sequence_length=16777216'],
        ['65,536 blocks', 'model.attention_block=256', 'at most 4,096'],
      )
      for command in (
        ['check', '--config=quickstart'],
        [*QUICK, '--workdir=W'],
        [*QUICK, '--dry_run'],
      )
    ),
    ([*QUICK, '--workdir=W', '--config.train=3'], ['train is a section']),
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
    ([*QUICK, '--workdir=W', '--mesh=dta=2'], ["Did you mean 'data'?"]),
    ([*QUICK, '--workdir=W', '--mesh=data=x'], ["is 'x', not a number"]),
    ([*QUICK, '--workdir=W', '--devices=-1'], ['devices']),
    ([*QUICK, '--workdir=W', '--process_id=1'], ['not HOST:PORT']),
    (['reproduce'], ['reproduce what?']),
    (['reproduce', 'gpipe', '--budget=3m'], ['add --all']),
    (
      ['reproduce', '--all', '--budget=soon'],
      ['--budget=soon', '--budget=30m'],
    ),
    (['reproduce', '--all', '--budget=1s'], ['1 CPU-seconds', 'takes 2']),
    (['reproduce', 'gpipe', '--all'], ['every config: leave out gpipe']),
    (
      ['reproduce', '--all', '--json', '--workdir=here', '--knockout'],
      ['leave out --workdir, --knockout, --json'],
    ),
    (['reproduce', 'quikstart'], ["Did you mean 'quickstart'?"]),
    (['reproduce', 'quickstart', '--config=quickstart'], ['does not read it']),
    (['plot'], ['--workdir is missing']),
    (['plot', 'W'], ['write --workdir=W']),
    (['plot', '--workdir=W'], ['metrics.jsonl does not exist']),
    (['data'], ['paraxis data fetch']),
    (['data', 'fetsh'], ["Did you mean 'fetch'?"]),
    (['data', 'fetch', '--skip=nothing'], ['--skip=nothing']),
    (['papers', 'zebra'], ["no paper mentions 'zebra'"]),
    (['doctor', '--mesh=data=3'], ['needs 3 devices, but 8']),
  ],
)
def test_commands(refused, tmp_path, argv, words):
  refused([a.replace('=W', f'={tmp_path / "run"}') for a in argv], *words)
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'text, words',
  [
    ('x = 1\n', ['defines no get_config']),
    ('def get_config(:\n', ['mine.py:1: SyntaxError']),
    ('def get_config():\n  return 1 / 0\n', ['ZeroDivisionError']),
    ('def get_config():\n  return {}\n', ['returns dict', 'ConfigDict']),
    ('import sys\nsys.exit("no\\nlines")\n', ['SystemExit', 'no lines']),
    (
      'def get_config():\n'
      '  from paraxis.configs import schema\n'
      '  config = schema.default()\n'
      '  config.model.n_layers = 3\n',
      ['mine.py:4: Attr', '"n_layers" does not exist. Did', '"num_layers"?'],
    ),
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


@pytest.mark.fault(38)
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


@pytest.mark.fault(17)
@pytest.mark.parametrize('name', ['file', 'file/run'])
def test_a_workdir_that_cannot_be_written(
  refused, train, tmp_path, monkeypatch, name
):
  (tmp_path / 'file').write_text('')
  monkeypatch.chdir(tmp_path)
  where = str(tmp_path / name)  # a relative one is resolved
  refused(train(workdir=name), f'--workdir={name}:', where)


@pytest.mark.fault(43)
def test_two_runs_in_one_workdir(refused, train, tmp_path):
  held = workdir_lib.Lock(workdir_lib.prepare(tmp_path / 'run'))
  refused(train(), 'in use by another run', f'process {os.getpid()}')
  held.close()


@pytest.fixture(scope='module')
def finished(tiny, tmp_path_factory):
  """The workdir of a whole run."""
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  tiny.run(workdir)
  return workdir


WIDER = ['--config.model.d_model=48', '--config.model.d_ff=96']


def test_a_workdir_of_another_config(refused, train, finished):
  refused(
    train(*WIDER, workdir=finished),
    'model.d_model was 32, is now 48',
    'model.d_ff was 64, is now 96',
    'another --workdir with new ones: model.d_model, model.d_ff set the shapes',
    workdir=finished,
  )


@pytest.mark.fault(23)
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
  """The copy in the newest manifest is offered, and what that takes works."""
  config = finished / workdir_lib.CONFIG
  held = config.read_bytes()
  for content in (held[:100], b'null', b'[]', b'{"train":' * 10**5):
    config.write_bytes(content)
    refused(
      train(workdir=finished),
      f'{config} is damaged: ',
      f'The manifest of {finished}/checkpoints/6 has a copy: move config.json',
      workdir=finished,
      code=14,
    )
  config.unlink()
  assert cli.main(train(workdir=finished)) == 0
  assert config.read_bytes() == held


@pytest.fixture
def lost(finished, tmp_path):
  """A copy of the finished run, whose checkpoints are elsewhere."""
  run, disk = tmp_path / 'run', tmp_path / 'disk'
  shutil.copytree(finished, run)
  shutil.move(run / 'checkpoints', disk)
  (run / 'checkpoints').symlink_to(disk)
  return run, disk


def test_lost_checkpoints(refused, train, lost):
  """As of a disk that is not mounted: no start at step 0 in silence."""
  run, disk = lost
  refused(train('--from_scratch'), '3 readable checkpoints (steps 6, 4, 2)')
  disk.rename(disk.with_name('away'))
  (run / 'events.jsonl').unlink()  # of a run without a ledger
  words = 'has lost its checkpoints', f'leads to {disk}', '--from_scratch'
  refused(train(), 'config.json and metrics.jsonl are here', *words, code=14)
  disk.mkdir()  # an empty place to mount it on
  row = '{"time": 1.0, "event": "commit", "step": 6}\n'
  (run / 'events.jsonl').write_text(row)
  words = 'events.jsonl says that step 6 was committed', 'holds no step'
  refused(train(), *words, code=14)


def test_from_scratch_begins_again(train, lost, capsys):
  """At step 0; what was there is kept, byte for byte."""
  run, disk = lost
  disk.rename(disk.with_name('away'))
  before = _tree(run)
  flags = ['--from_scratch', '--config.train.seed=3', '--config.train.steps=2']
  assert cli.main(train(*flags)) == 0
  (aside,) = run.glob('before-*')
  assert f'are now in {aside}' in capsys.readouterr().out
  kept = _tree(aside)
  assert kept == {p: x for p, x in before.items() if p.name != '.lock'}
  assert list(metrics.read(run)) == [1, 2]
  assert workdir_lib.read_config(run).train.seed == 3
  assert [p.name for p in (run / 'checkpoints').iterdir()] == ['2']


@pytest.mark.parametrize('name', ['config.json', 'metrics.jsonl'])
def test_a_named_pipe_in_a_workdir(refused, train, tmp_path, name):
  run = workdir_lib.prepare(tmp_path / 'run')
  os.mkfifo(run / name)
  with support.within(60):
    refused(train(), f'{run / name} ', 'it is a named pipe', code=14)
  (run / name).rename(run / '.lock')
  with support.within(60):
    refused(train(), f'{run / ".lock"} cannot be opened', 'it is a named pipe')


@pytest.mark.parametrize('where', ['text.txt', 'folder/b.jsonl', 'plain'])
def test_text_that_is_a_named_pipe(refused, train, tmp_path, where):
  path = tmp_path / where
  path.parent.mkdir(exist_ok=True)
  (path.parent / 'a.txt').write_text('sea and wind')
  os.mkfifo(path)
  named = path.parent if 'folder' in where else path
  with support.within(60):
    flag = f'--config.data.path={named}'
    refused(train(flag), f'{path} cannot be read: it is a named pipe')


@pytest.mark.parametrize('packing', ['concat_split', 'first_fit'])
def test_documents_longer_than_a_row_are_cut_and_counted(tiny, packing):
  said = []
  job = tiny.job({'data.packing': packing}, say=said.append)
  lengths = job.corpus.lengths[~job.corpus.held]
  assert (lengths > 65).all()
  text = f'data: {len(lengths)} documents are cut between rows of 64 tokens; '
  assert text + 'every token is used.' in said
  assert job.batches.plan.pairs == (lengths - 1).sum()
