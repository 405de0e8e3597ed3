"""Checks of convolutions hold, and fail where what they check is broken."""

import json
import pathlib

import claim_cases
import jax.numpy as jnp
import pytest

from paraxis.configs.base import mixers as mixer_schema
from paraxis.models.mixers import recurrence
from paraxis.models.mixers import tcn
from paraxis.train.claims import experiment
from paraxis.train.claims.scans import tcn as claims_tcn


@pytest.fixture
def run(tmp_path):
  return claim_cases.run_of(
    '',
    {
      'model.vocab_size': 64, 'model.d_model': 16, 'model.num_layers': 1,
      'model.num_heads': 2, 'model.d_ff': 16, 'model.attention_block': 8,
      'model.position': 'none', 'model.pattern': 'C', 'model.tcn.kernel': 3,
      'model.tcn.depth': 2, 'model.tcn.chunk': 8, 'model.tcn.key_dim': 4,
    },
    tmp_path,
  )  # fmt: skip


def field(run):
  return claims_tcn.field_is_the_formula(
    run, cases=[dict(kernel=3, dilation=2, depth=2)]
  )


def test_a_field_is_found_by_changing_a_token(run, monkeypatch):
  found = field(run)
  assert found.passed and found.measured == '7'
  with claims_tcn.no_dilation():
    found = field(run)
  assert not found.passed and found.measured == '5'
  monkeypatch.setattr(tcn, 'dilations', lambda own: [1, 3])
  monkeypatch.setattr(tcn, 'receptive_field', lambda own: 7)
  assert field(run).measured == '9'


def test_steps_equal_a_pass_until_a_tail_is_lost(run):
  real = recurrence.conv

  def forgets(*given):
    y, tail = real(*given)
    return y, jnp.zeros_like(tail)

  claim_cases.holds_until(
    recurrence, 'conv', forgets, claims_tcn.streams_as_a_whole, run,
    own=dict(chunk=4), length=10, prompts=[5], within=1e-11,
  )  # fmt: skip


def test_chunks_over_shards_until_each_counts_alone(run):
  chunks = tcn.chunks
  alone = lambda *given: chunks(*given[:3])
  claim_cases.holds_until(
    tcn, 'chunks', alone, claims_tcn.chunks_over_shards, run,
    mesh=dict(context=8), length=32, chunks=[6], within=1e-9,
  )  # fmt: skip


def test_costs_grow_with_the_row_or_not(run):
  check = lambda: claims_tcn.cost_of_a_token(run, lengths=[64, 128, 256])
  found = check()
  inside, whole = map(float, found.measured.split())
  assert found.passed and inside == 1 and whole > 1.01
  row = {'model.tcn.chunk': 256}  # one chunk
  run.config = experiment.fields(run.config, row)
  assert not check().passed


BITS = {'a-0': 2.0, 'a-1': 2.1, 'a-2': 2.2, 'b-0': 2.5, 'b-1': 2.7, 'b-2': 2.6}


@pytest.fixture
def trained(monkeypatch):
  return claim_cases.trains_to(monkeypatch, BITS)


WAYS = dict(variants={'a': {}, 'b': dict(depth=1)}, pair=['a', 'b'])


def test_bits_are_reported_by_reach(run, trained):
  check = lambda apart, seeds=(0, 1, 2), word='opposite': (
    claims_tcn.bits_by_reach(
      run, apart=apart, verdict=word, seeds=seeds, **WAYS
    )
  )
  found = check(0.3)  # 0.5 +-0.058
  assert found.passed and found.measured == '0.5000 +-0.0577'
  assert found.verdict == 'opposite' and found.seeds == 3
  assert check(0.3, word='reproduced').verdict == 'reproduced'
  assert check(0.3, [0]).verdict == 'not reproduced' and check(0.3, [0]).passed
  assert 'a 2.1000' in found.caveat and 'b (reach 3)' in found.caveat
  assert [c.model.tcn.depth for c in trained] == [2, 1] * 3
  assert not check(0.4).passed and check(0.4).verdict == 'direction only'


def test_other_words_are_written_and_the_same_are_kept(tmp_path):
  path = tmp_path / 'words.jsonl'
  path.write_text('{"text": "ab')  # cut off by a kill
  write = lambda period: claims_tcn.repeated(path, period, 4, 3, 20)
  texts, files = [], []
  for period in (5, 5, 6):
    write(period)
    texts.append(path.read_text())
    files.append(path.stat().st_ino)
  assert texts[0] == texts[1] != texts[2] and files[0] == files[1] != files[2]
  words = [json.loads(line)['text'] for line in texts[2].splitlines()]
  assert len(words) == 3 and all(w[6:] == w[:-6] for w in words)
  assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_words_are_repeated(run, trained):
  found = claims_tcn.repetition_in_reach(
    run, text=dict(period=5, symbols=4, documents=3), steps=7, apart=0.4,
    seeds=[0],
    model={'model.d_model': 8, 'model.tcn.chunk': 2}, **WAYS,
  )  # fmt: skip
  assert found.passed and '2 bits a letter' in found.caveat
  config = trained[1]
  assert config.model.d_model == 8 and config.train.steps == 7
  assert config.model.tcn == mixer_schema.Tcn(
    kernel=3, depth=1, chunk=2, key_dim=4
  )
  lines = pathlib.Path(config.data.path).read_text('utf-8').splitlines()
  words = [json.loads(line)['text'] for line in lines]
  length = run.config.data.sequence_length - 1
  assert len(set(words)) == 3 and {len(w) for w in words} == {length}
  assert all(w[5:] == w[:-5] and set(w) <= set('abcd') for w in words)
