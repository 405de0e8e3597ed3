"""Weights to a folder of Hugging Face and back, bitwise."""

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import peers
import pytest
from safetensors import numpy as safetensors
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import load
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models.huggingface import files as files_lib
from paraxis.models.huggingface import leaves as leaves_lib
from paraxis.models.huggingface import source
from paraxis.models.huggingface.families import known
from paraxis.models.text import tokenizer
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.train import exchange
from paraxis.train.run import merge
from paraxis.train.run import origin as origin_lib
from paraxis.train.run import workdir as workdir_lib

MODEL = dict(
  vocab_size=2048, d_model=16, num_layers=3, num_heads=4, num_kv_heads=2,
  d_ff=24, tied_embedding=False, embedding_init_std=1.0,
)  # fmt: skip


def quiet(line):
  del line


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """(folder of a run on a mesh of stages, its parameters in order)."""
  path = tmp_path_factory.mktemp('run')
  config = schema.view({'model': MODEL, 'mesh': dict(fsdp=2, tensor=2)})
  built = build.build(config, '', devices=jax.devices()[:4])
  with build.use(built):
    params = jax.jit(lambda: built.model.init(jax.random.key(0)))()
  support.save_run(path, config, built, params, (1, 5))
  return path, {p: np.asarray(x) for p, x in params.items()}


@pytest.fixture(scope='module')
def exported(run, tmp_path_factory):
  out = tmp_path_factory.mktemp('out') / 'hf'
  exchange.send(str(run[0]), out, say=quiet)
  return out


def test_round_trip_is_bitwise(run, exported, tmp_path):
  _, wanted = run
  exchange.bring(str(exported), tmp_path / 'a', say=quiet)
  found = origin_lib.Run(str(tmp_path / 'a')).arrays(list(wanted))
  for path, x in wanted.items():
    np.testing.assert_array_equal(found[path], x)
  exchange.send(str(tmp_path / 'a'), tmp_path / 'b', say=quiet)
  first, second = (
    safetensors.load_file(str(f / 'model.safetensors'))
    for f in (exported, tmp_path / 'b')
  )
  assert set(first) == set(second)
  assert all(np.array_equal(first[n], second[n]) for n in first)


def test_what_is_written(run, exported):
  config = json.loads((exported / 'config.json').read_text())
  assert config['model_type'] == 'llama'
  assert config['num_hidden_layers'] == 3 and config['hidden_size'] == 16
  ours = tokenizer.load('bpe2048')
  assert config['bos_token_id'] == ours.bos_id(None)
  assert config['eos_token_id'] == ours.end_id
  assert config['pad_token_id'] == ours.pad_id != ours.end_id
  tensors = safetensors.load_file(str(exported / 'model.safetensors'))
  up = run[1]['layers/mlp/up'][1]
  np.testing.assert_array_equal(
    tensors['model.layers.1.mlp.up_proj.weight'], up.T
  )
  modes = {p.stat().st_mode & 0o777 for p in exported.iterdir()}
  assert modes == {0o644} and (exported.stat().st_mode & 0o777) == 0o755
  text = (exported / files_lib.TOKENIZER).read_text()
  assert text == ours.text


def test_files_of_a_size(run, exported, tmp_path, monkeypatch):
  """Several files hold the tensors of one, each in one of them."""
  monkeypatch.setattr(exchange, 'SHARD', 2**14)
  exchange.send(str(run[0]), tmp_path / 'hf', say=quiet)
  found = sorted((tmp_path / 'hf').glob('*.safetensors'))
  index = json.loads((tmp_path / 'hf' / files_lib.INDEX).read_text())
  assert len(found) > 3
  assert set(index['weight_map'].values()) == {p.name for p in found}
  whole = safetensors.load_file(str(exported / 'model.safetensors'))
  read = source.Source(tmp_path / 'hf').files
  assert set(read.shapes) == set(whole)
  for name, x in whole.items():
    np.testing.assert_array_equal(read.read(name), x)
  assert index['metadata']['total_size'] == sum(
    x.nbytes for x in whole.values()
  )


def test_bfloat16_halves_it(run, exported, tmp_path):
  exchange.send(str(run[0]), tmp_path / 'hf', 'bfloat16', say=quiet)
  files = [f / 'model.safetensors' for f in (exported, tmp_path / 'hf')]
  wide, narrow = (source.Source(f.parent).files for f in files)
  for name in wide.shapes:
    a, b = wide.read(name), narrow.read(name)
    assert b.dtype.name == 'bfloat16'
    np.testing.assert_allclose(a, b.astype('f4'), rtol=2**-8, atol=0)
  sizes = [f.stat().st_size for f in files]
  assert sizes[1] < 0.55 * sizes[0]


def test_what_balances_a_router_is_never_rounded(tmp_path):
  """Rounded, another expert would be chosen; transformers keeps it wide, too.
  A step of it is 1e-3, and above .5 one of bfloat16 is .004."""
  experts = dict(
    count=4, top_k=2, d_ff=16, scores='sigmoid', bias_rate=1e-3, groups=2,
    top_groups=1, shared=1,
  )  # fmt: skip
  latent = dict(rank=8, nope_dim=4, rope_dim=4, value_dim=4)
  fields = dict(pattern='A', num_kv_heads=4, experts=experts, latent=latent)
  config = schema.view({'model': MODEL | fields})
  built, params = support.untrained(config)
  path = 'layers/moe/bias'
  params[path] = 0.5 + 1e-3 * jax.numpy.arange(12.0).reshape(3, 4)
  support.save_run(tmp_path / 'run', config, built, params)
  exchange.send(str(tmp_path / 'run'), tmp_path / 'hf', 'bfloat16', say=quiet)
  files = source.Source(tmp_path / 'hf').files
  wide = {n for n in files.shapes if files.read(n).dtype == np.float32}
  assert {n.rpartition('.')[2] for n in wide} == {'e_score_correction_bias'}
  exchange.bring(str(tmp_path / 'hf'), tmp_path / 'back', say=quiet)
  found = origin_lib.Run(str(tmp_path / 'back')).arrays([path])[path]
  np.testing.assert_array_equal(found, params[path])


@pytest.mark.parametrize('mesh', ['data=8', 'data=2,fsdp=4'])
def test_decoding_of_either_is_the_same(run, exported, mesh):
  """The run, and the folder that it became."""
  texts = []
  for opened in (
    load.Checkpoint(str(run[0]), None, quiet),
    load.Weights(str(exported), quiet),
  ):
    with opened as checkpoint:
      config = schema.view(checkpoint.config())
      made = checkpoint.generator(config, mesh)
      texts.append(made.generate(['one', 'two'], max_new_tokens=6))
  for a, b in zip(*texts, strict=True):
    assert a['tokens'] == b['tokens']
    np.testing.assert_allclose(a['logprobs'], b['logprobs'], atol=1e-5)


def test_imported_weights_are_no_run_to_resume(tiny, exported, tmp_path):
  exchange.bring(str(exported), tmp_path / 'a', say=quiet)
  with support.refused('imported', '--init_from'):
    tiny.run(tmp_path / 'a')
  with support.refused('has checkpoints', '--workdir'):
    exchange.bring(str(exported), tmp_path / 'a', say=quiet)


@pytest.mark.invariant(11)
def test_a_run_that_was_moved_or_copied(tiny, exported, tmp_path):
  """Its tokenizer is in its folder, and its text elsewhere: it resumes, decodes
  and is exported, as long as their content is the same."""
  a, b, c = (tmp_path / name for name in 'abc')
  text, other = tmp_path / 'text' / 'song.txt', tmp_path / 'moved' / 'song.txt'
  text.parent.mkdir()
  shutil.copy(tiny.text, text)
  fields = {'data.tokenizer': '', 'data.sequence_length': 32}

  def train(run, path, steps):
    weights = origin_lib.Foreign(str(exported))
    last = {'data.path': str(path), 'train.steps': steps}
    return tiny.run(run, fields | last, 'data=1', weights)

  train(a, text, 2)
  shutil.copytree(a, c)
  a.rename(b)
  text.parent.rename(other.parent)
  said = train(b, other, 3)[1]
  assert 'resumed from step 2, every leaf verified' in said
  moved = [line for line in said if line.startswith('config: data.')]
  assert [line.split()[1] for line in moved] == ['data.path', 'data.tokenizer']
  # Another host compares with the manifest, and has a copy of the text.
  b.rename(a)
  shutil.copytree(other.parent, text.parent)
  (c / workdir_lib.CONFIG).unlink()
  assert 'resumed from step 2, every leaf verified' in train(c, other, 3)[1]
  shutil.move(c, b)
  with load.Checkpoint(str(b), None, quiet) as checkpoint:
    config = schema.view(checkpoint.config())
    assert config.data.tokenizer == str(b / files_lib.TOKENIZER)
    checkpoint.parts(config, 'data=8')
  exchange.send(str(b), tmp_path / 'out', say=quiet)
  assert (tmp_path / 'out' / files_lib.TOKENIZER).is_file()
  # Of another content it is not the run's.
  other.write_text(other.read_text() + ' more')
  with pytest.raises(errors.IntegrityError, match='the corpus changed'):
    train(b, other, 4)
  with (b / files_lib.TOKENIZER).open('a') as file:
    file.write(' ')
  with load.Checkpoint(str(b), None, quiet) as checkpoint:
    assert checkpoint.config().data.tokenizer == str(c / files_lib.TOKENIZER)


def contents(folder):
  return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_the_files_of_a_model_are_not_replaced_by_a_run(
  exported, run, tmp_path
):
  folder = tmp_path / 'theirs'
  shutil.copytree(exported, folder)
  before = contents(folder)
  with support.refused('has a model of Hugging Face', '--workdir'):
    exchange.bring(str(folder), folder, say=quiet)
  with support.refused('has a model of Hugging Face'):
    merge.write([(str(run[0]), 1.0)], folder, quiet)
  assert contents(folder) == before


def test_other_weights_leave_the_tokenizer_of_a_run(run, exported, tmp_path):
  """A run that will be refused keeps the files that it is read with."""
  there, other = tmp_path / 'a', tmp_path / 'b'
  exchange.bring(str(exported), there, say=quiet)
  exchange.send(str(run[0]), other, dtype='bfloat16', say=quiet)
  (other / 'tokenizer_config.json').unlink()
  before = contents(there)
  default = schema.Config()
  with support.refused(f'{there} has a run of', str(exported), str(other)):
    origin_lib.Foreign(str(other)).configured(default, there, quiet)
  assert contents(there) == before
  origin_lib.Foreign(str(exported)).configured(default, there, quiet)


def test_a_run_that_kept_names_and_sizes_of_its_weights_goes_on(
  exported, tmp_path, monkeypatch
):
  """One that began before a fingerprint had a sample of their bytes."""
  whole = files_lib.Files.fingerprint
  with monkeypatch.context() as earlier:
    sizes = lambda self, sampled=True: whole(self, sampled=False)
    earlier.setattr(files_lib.Files, 'fingerprint', sizes)
    exchange.bring(str(exported), tmp_path, say=quiet)
  default, again = schema.Config(), origin_lib.Foreign(str(exported))
  again.configured(default, tmp_path, quiet)
  began = origin_lib.Run(str(tmp_path))._meta['origin']
  assert began['sha256'] != again.about['sha256']


@pytest.mark.parametrize('lost', [False, True])
def test_a_folder_of_another_run_keeps_its_files(
  tiny, exported, tmp_path, lost
):
  """One that runs before its first save, or whose checkpoints are gone."""
  for name in (files_lib.TOKENIZER, files_lib.TEMPLATE, 'metrics.jsonl'):
    (tmp_path / name).write_text('theirs')
  if lost:
    workdir_lib.write_config(tmp_path, tiny.config())
  held = None if lost else workdir_lib.Lock(tmp_path)
  before, theirs = contents(tmp_path), {'data.tokenizer': ''}
  weights = origin_lib.Foreign(str(exported))
  calls = (
    lambda: tiny.run(tmp_path, theirs, source=weights),
    lambda: exchange.bring(str(exported), tmp_path, say=quiet),
  )
  for call in calls:
    with pytest.raises((errors.UserError, errors.IntegrityError)) as caught:
      call()
    words = 'has lost its checkpoints' if lost else 'in use by another run'
    assert words in str(caught.value)
    assert contents(tmp_path) == before
  if held:
    held.close()


def test_no_run_begins_where_weights_are_imported(
  exported, tmp_path, monkeypatch
):
  save, tried = store_lib.Store.save, []

  def saves(self, *named):
    with support.refused('in use by another run'):
      workdir_lib.Lock(tmp_path)
    tried.append(save(self, *named))

  monkeypatch.setattr(store_lib.Store, 'save', saves)
  exchange.bring(str(exported), tmp_path, say=quiet)
  assert tried
  workdir_lib.Lock(tmp_path).close()


def test_ids_of_their_tokenizer_are_not_those_of_another(exported, tmp_path):
  folder = tmp_path / 'theirs'
  shutil.copytree(exported, folder)
  config = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps(config | dict(eos_token_id=7)))
  (tmp_path / 'run').mkdir()
  for name, ends in (('', 7), ('bytes', 0)):
    found = origin_lib.Foreign(str(folder))
    given = schema.with_value(schema.Config(), 'data.tokenizer', name)
    found.configured(given, tmp_path / 'run', quiet)
    assert found.about['ends'] == ([ends] if ends else [])


def test_an_export_needs_no_end_of_a_known_name(exported, tmp_path):
  """The files of the weights say it, whatever it is called."""
  folder = tmp_path / 'theirs'
  shutil.copytree(exported, folder)
  spec = json.loads((folder / 'tokenizer.json').read_text())
  end = tokenizer.load('bpe2048').end_id
  entry = next(t for t in spec['added_tokens'] if t['id'] == end)
  vocab = spec['model']['vocab']
  vocab['<EOS_TOKEN>'] = vocab.pop(entry['content'])
  entry['content'] = '<EOS_TOKEN>'
  begin = next(t for t in spec['added_tokens'] if t['id'] == 2)
  vocab['<s>'] = vocab.pop(begin['content'])
  begin['content'] = '<s>'
  (folder / 'tokenizer.json').write_text(json.dumps(spec))
  exchange.bring(str(folder), tmp_path / 'a', say=quiet)
  exchange.send(str(tmp_path / 'a'), tmp_path / 'b', say=quiet)
  written = json.loads((tmp_path / 'b' / 'tokenizer_config.json').read_text())
  assert written['eos_token'] == '<EOS_TOKEN>'
  # Text is trained on, too, where tokenizer_config.json names it ...
  shutil.copy(tmp_path / 'b' / 'tokenizer_config.json', folder)
  theirs, file = source.Source(folder), tmp_path / 'c' / 'tokenizer.json'
  file.parent.mkdir()
  for begun in (False, True):
    theirs.keep_tokenizer(file, begun)
    assert tokenizer.load(str(file)).end_id == end
  # ... but for a run that began before it was written.
  file.with_name('tokenizer_config.json').unlink()
  theirs.keep_tokenizer(file, True)
  assert tokenizer.load(str(file)).last is None


def test_ids_that_nobody_knows_are_null(run, exported, tmp_path):
  """A field that is not there would be the default of a class."""
  folder = tmp_path / 'theirs'
  shutil.copytree(exported, folder)
  names = 'bos_token_id', 'eos_token_id', 'pad_token_id'
  config = json.loads((folder / 'config.json').read_text())
  config |= dict.fromkeys(names)
  (folder / 'config.json').write_text(json.dumps(config))
  spec = json.loads((folder / 'tokenizer.json').read_text())
  spec['added_tokens'] = []
  spec['post_processor'] = None
  (folder / 'tokenizer.json').write_text(json.dumps(spec))
  exchange.bring(str(folder), tmp_path / 'a', say=quiet)
  exchange.send(str(tmp_path / 'a'), tmp_path / 'b', say=quiet)
  written = json.loads((tmp_path / 'b' / 'config.json').read_text())
  assert {name: written[name] for name in names} == dict.fromkeys(names)
  words = json.loads((tmp_path / 'b' / 'tokenizer_config.json').read_text())
  assert 'bos_token' not in words and 'eos_token' not in words
  exchange.send(str(tmp_path / 'a'), tmp_path / 'c', 'float32', 'cwm', quiet)
  written = json.loads((tmp_path / 'c' / 'config.json').read_text())
  # Its class takes no null for the other.
  assert {*names} & {*written} == {'eos_token_id', 'pad_token_id'}


@pytest.mark.hf
def test_ids_that_are_null_open_in_transformers():
  """But where a family is listed as one that leaves its bos out."""
  import hf_peer  # skips without torch
  from huggingface_hub import errors as hub

  classes = hf_peer.transformers.CONFIG_MAPPING
  names, refused = ('bos_token_id', 'eos_token_id', 'pad_token_id'), set()
  for family in {*known.FAMILIES} & {*classes}:
    for name in names:
      try:
        classes[family](**{name: None})
      except hub.StrictDataclassError:
        refused.add((family, name))
  assert refused == {(family, names[0]) for family in exchange.BEGINS}


def test_a_parameter_that_no_tensor_is_made_of(run, tmp_path, monkeypatch):
  table = leaves_lib.table

  def less(*given):
    return [x for x in table(*given) if x.path != 'layers/mlp/up']

  monkeypatch.setattr(leaves_lib, 'table', less)
  with support.refused('only one has layers/mlp/up', '12 parameters', '11'):
    exchange.send(str(run[0]), tmp_path / 'hf', say=quiet)
  assert not list(tmp_path.iterdir())


@pytest.mark.hf
@pytest.mark.parametrize('name', ['phi3', 'smollm3', 'llama'])
def test_transformers_opens_an_export(run, tmp_path, name):
  """Whatever ids its class has by default, which are no rows of this one."""
  import hf_peer  # skips without torch

  exchange.send(str(run[0]), tmp_path / 'hf', model_type=name, say=quiet)
  auto = hf_peer.transformers.AutoModelForCausalLM
  theirs, said = auto.from_pretrained(tmp_path / 'hf', output_loading_info=True)
  assert not said['missing_keys'] and not said['unexpected_keys']
  assert theirs.config.pad_token_id == tokenizer.load('bpe2048').pad_id
  tokens = np.arange(5, 21)[None]
  with hf_peer.torch.no_grad():
    wanted = theirs(hf_peer.torch.tensor(tokens)).logits.numpy()
  model = origin_lib.Run(str(run[0])).config().model
  model = decoder.Decoder(dataclasses.replace(model, dtype='float32'))
  data = peers.rows(2048, (1, 16))._replace(tokens=tokens)
  found = model.logits(run[1], model.features(run[1], data)[0])
  np.testing.assert_allclose(found, wanted, atol=1e-4)


def full(self, tree):
  del self, tree
  raise errors.UserError('the disk is full')


def test_an_import_that_failed_is_begun_again(exported, tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(store_lib.Store, 'preflight', full)
    with support.refused('disk is full'):
      exchange.bring(str(exported), tmp_path / 'a', say=quiet)
  exchange.bring(str(exported), tmp_path / 'a', say=quiet)
  assert origin_lib.Run(str(tmp_path / 'a')).about['step'] == 0


def test_a_template_is_whole_and_of_these_weights(
  exported, tmp_path, monkeypatch
):
  """Several processes write it, and read each other's; one of an import that
  failed does not stay for weights that have none."""
  folder, out = tmp_path / 'theirs', tmp_path / 'a'
  shutil.copytree(exported, folder)
  monkeypatch.setattr(store_lib.Store, 'preflight', full)
  for text in ('one', 'another'):
    (folder / files_lib.TEMPLATE).write_text(text)
    with support.refused('disk is full'):
      exchange.bring(str(folder), out, say=quiet)
    assert (out / files_lib.TEMPLATE).read_text() == text
    (tmp_path / text).hardlink_to(out / files_lib.TEMPLATE)
  assert (tmp_path / 'one').read_text() == 'one'  # it was not written in place
  with support.refused('disk is full'):
    exchange.bring(str(exported), out, say=quiet)
  assert not (out / files_lib.TEMPLATE).exists()
  monkeypatch.undo()
  # Where nothing of other weights was read it is somebody's own.
  own = tmp_path / 'own'
  own.mkdir()
  (own / files_lib.TEMPLATE).write_text('mine')
  exchange.bring(str(exported), own, say=quiet)
  origin_lib.Foreign(str(exported)).configured(schema.Config(), own, quiet)
  assert (own / files_lib.TEMPLATE).read_text() == 'mine'


def test_licence_and_origin_travel(run, exported, tmp_path):
  """From a folder through an import to an export."""
  folder = tmp_path / 'theirs'
  folder.mkdir()
  for file in exported.iterdir():
    (folder / file.name).write_bytes(file.read_bytes())
  (folder / 'README.md').write_text('---\nlicense: apache-2.0\n---\n')
  config = json.loads((folder / 'config.json').read_text())
  config |= dict(eos_token_id=7, bos_token_id=4)
  (folder / 'config.json').write_text(json.dumps(config))
  (folder / files_lib.TOKENIZER_CONFIG).unlink()  # nothing but ids says them
  (folder / files_lib.TEMPLATE).write_text('a template')
  said = []
  exchange.bring(str(folder), tmp_path / 'a', say=said.append)
  assert any('apache-2.0' in line for line in said)
  exchange.send(str(tmp_path / 'a'), tmp_path / 'b', say=quiet)
  about = source.Source(tmp_path / 'b').about
  assert about['licence'] == 'apache-2.0' and about['template'] == 'a template'
  assert about['ends'] == [7]
  written = json.loads((tmp_path / 'b' / 'config.json').read_text())
  assert written['bos_token_id'] == config['bos_token_id'] == about['bos']
  # What documents begin with, of a run as of the folder.
  for opened in (
    load.Checkpoint(str(tmp_path / 'a'), None, quiet),
    load.Weights(str(tmp_path / 'b'), quiet),
  ):
    with opened as checkpoint:
      made = tokenizer.load(checkpoint.config().data.tokenizer)
      assert made.bos_id() == 4 != tokenizer.load('bpe2048').bos_id()


def test_an_id_that_is_none_of_a_text_is_written_back(exported, tmp_path):
  """As of SmolLM2, whose documents begin with another one."""
  folder = tmp_path / 'theirs'
  shutil.copytree(exported, folder)
  for name, change in (
    ('config.json', dict(bos_token_id=3)),
    ('tokenizer_config.json', dict(add_bos_token=False)),
  ):
    text = json.loads((folder / name).read_text()) | change
    (folder / name).write_text(json.dumps(text))
  spec = json.loads((folder / 'tokenizer.json').read_text())
  entry = next(t for t in spec['added_tokens'] if t['id'] == 2)
  spec['model']['vocab']['<s>'] = spec['model']['vocab'].pop(entry['content'])
  entry['content'] = '<s>'
  (folder / 'tokenizer.json').write_text(json.dumps(spec))
  exchange.bring(str(folder), tmp_path / 'a', say=quiet)
  exchange.send(str(tmp_path / 'a'), tmp_path / 'b', say=quiet)
  assert source.Source(tmp_path / 'b').about['bos'] == 3
  for opened in (
    load.Checkpoint(str(tmp_path / 'a'), None, quiet),
    load.Weights(str(folder), quiet),
  ):
    with opened as checkpoint:
      made = tokenizer.load(checkpoint.config().data.tokenizer)
      assert made.bos_id() == 2


def test_a_run_that_is_not_there_is_told_by_its_flag(tmp_path):
  none = tmp_path / 'none'
  with support.refused(f'--checkpoint={none}: no folder'):
    exchange.send(str(none), tmp_path / 'out')


def test_what_is_not_exported(run, exported, tmp_path):
  with support.refused('--dtype=float8', 'bfloat16'):
    exchange.send(str(run[0]), tmp_path / 'a', 'float8', say=quiet)
  with support.refused('not empty'):
    exchange.send(str(run[0]), exported, say=quiet)
  with support.refused('gpt2'):
    exchange.send(str(run[0]), tmp_path / 'a', model_type='gpt2', say=quiet)
  assert not list(tmp_path.iterdir())
  (file := tmp_path / 'file').touch()
  for out in (file, file / 'a', file / 'a' / 'b'):
    with support.refused(f'--out={out}: cannot write', f'{file}'):
      exchange.send(str(run[0]), out, say=quiet)
  assert [*tmp_path.iterdir()] == [file]


# What a process of its own says: bytes of the tensors, and by how much its
# memory grew while it imported them, first as it is, then with all leaves read
# before one is saved.
GROWTH = """
import functools, pathlib, sys, threading
from paraxis.sharding.checkpoint import saved_arrays
from paraxis.train import exchange
from paraxis.train.run import origin as origin_lib
from paraxis.train.bench import own_run
saved_arrays.IN_FLIGHT = 2**23
bring = functools.partial(
  exchange.bring, say=lambda line: None, tokenizer='bytes'
)
root = pathlib.Path(sys.argv[1])
fields = dict(
  vocab_size=2048, d_model=256, num_layers=30, num_heads=4, d_ff=1024
)
size = own_run.write(root / 'theirs', fields)
few = own_run.write(root / 'few', fields | dict(num_layers=2))

def held():
  text = pathlib.Path('/proc/self/status').read_text()
  return int(text.partition('RssAnon:')[2].split()[0]) * 1024

def growth(name):
  bring(str(root / 'few'), root / f'{name}-warm')
  most, done, before = [0], threading.Event(), held()
  def watch():
    while not done.wait(0.002):
      most[0] = max(most[0], held())
  thread = threading.Thread(target=watch)
  thread.start()
  bring(str(root / 'theirs'), root / name)
  done.set()
  thread.join()
  return most[0] - before

def rows(self, like):
  return {f'params/{p}': self._source.read(p, x) for p, x in like.items()}

streamed = growth('streamed')
origin_lib.Foreign.rows = rows
print(size, streamed, growth('whole'))
"""


def test_an_import_holds_a_part_of_the_model(tmp_path):
  command = [sys.executable, '-c', GROWTH, str(tmp_path)]
  out = subprocess.run(command, capture_output=True, text=True, check=False)
  assert not out.returncode, out.stderr
  size, streamed, whole = map(int, out.stdout.splitlines()[-1].split())
  assert size > 120e6 and whole > 1.2 * size, out.stdout
  assert streamed < 0.6 * size, out.stdout
