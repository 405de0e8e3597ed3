"""PyTorch, MaxText or llama.cpp beside the benches: it measures itself.

    python peer_process.py '{"peer": "hf", "bench": "step", "sizes": {...}}'

A file for another Python, which has torch and transformers, MaxText, or
xllamacpp, but no paraxis: nothing of paraxis is imported. Lines of standard
input and output (peers.py):

    it begins                 {"notes": "torch 2.13.0, ..."} or {"skip": why}
    run                       {"seconds": 1.23, "peak": 812.5}
    the input ends            it ends

Seconds are CPU-seconds of the process, once it is idle; peak is the most MiB
that were resident. Models are Llamas with random parameters, or what llama.cpp
reads from a file.
"""

import importlib
import json
import os
import queue
import sys
import tempfile
import threading
import time
from typing import Any

OLDEST = {
  'torch': (2, 4), 'transformers': (4, 48), 'xllamacpp': (2026, 10),
  'maxtext': (0, 2),
}  # fmt: skip


def settled(pause=0.004):
  """CPU-seconds, once the process has done nothing for three pauses."""
  before, idle = time.process_time(), 0
  while idle < 3:
    time.sleep(pause)
    after = time.process_time()
    idle = idle + 1 if after - before < pause / 10 else 0
    before = after
  return before


def peak():
  """The most MiB that were resident (by getrusage a parent's count, too)."""
  try:
    with open('/proc/self/status', encoding='ascii') as lines:
      kib = [int(x.split()[1]) for x in lines if x.startswith('VmHWM')]
      return kib[0] / 1024
  except (OSError, IndexError):
    import resource

    unit = 2**20 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def load(*names):
  """The packages; RuntimeError: one is missing or too old, and which."""
  out = []
  for name in names:
    try:
      package = importlib.import_module(name)
    except ImportError as error:
      raise RuntimeError(f'{name} does not import: {error}') from error
    version = tuple(int(x) for x in package.__version__.split('.')[:2])
    if version < OLDEST[name]:
      want = '.'.join(map(str, OLDEST[name]))
      raise RuntimeError(f'{name} {package.__version__} is older than {want}')
    out.append(package)
  return out


def llama(sizes):
  """(torch, transformers' Llama of the bench's sizes in float32)."""
  torch, transformers = load('torch', 'transformers')
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=sizes['vocab_size'],
    hidden_size=sizes['d_model'],
    intermediate_size=sizes['d_ff'],
    num_hidden_layers=sizes['num_layers'],
    num_attention_heads=sizes['num_heads'],
    num_key_value_heads=sizes['num_heads'],
    max_position_embeddings=sizes['length'],
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attn_implementation='sdpa',
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
  )
  return torch, transformers.LlamaForCausalLM(config).float()


def step(peer, sizes):
  """-> () of a training step: forward, backward, clipping, AdamW."""
  if peer == 'maxtext':
    return maxtext(sizes)
  torch, model = llama(sizes)
  model.train()
  update = torch.optim.AdamW(
    model.parameters(), lr=1e-3, weight_decay=0.1, fused=True
  )
  shape = sizes['rows'], sizes['length'] + 1
  tokens = torch.randint(0, sizes['vocab_size'], shape)
  call = model
  if peer == 'torch_compile':
    call = torch.compile(model, dynamic=False)

  def run():
    update.zero_grad(set_to_none=True)
    with torch.autocast('cpu', torch.bfloat16, peer == 'hf_autocast'):
      z = call(input_ids=tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
      z.float().flatten(0, 1), tokens[:, 1:].flatten()
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    update.step()
    return float(loss.detach())

  return run


def maxtext(sizes):
  """`step` of MaxText on its synthetic batches: one turn of its own loop.

  Its loop runs in a thread, and waits before each turn until it is asked. As a
  user has it on CPU: nothing of a layer is computed again (remat), no
  checkpoints, no TensorBoard.
  """
  os.environ['JAX_PLATFORMS'] = 'cpu'
  (package,) = load('maxtext')
  train: Any = importlib.import_module('maxtext.trainers.pre_train.train')
  turn, folder = train.training_loop_iteration, tempfile.TemporaryDirectory()
  asked, done = queue.Queue(), queue.Queue()
  given = dict(
    run_name='bench', base_output_directory=folder.name,
    dataset_type='synthetic', hardware='cpu', steps=10**6,
    skip_jax_distributed_system=True, enable_checkpointing=False,
    enable_tensorboard=False, log_config=False, dtype='float32',
    weight_dtype='float32', attention='dot_product', remat_policy='none',
    decoder_block='llama2', vocab_size=sizes['vocab_size'],
    base_emb_dim=sizes['d_model'], base_mlp_dim=sizes['d_ff'],
    base_num_decoder_layers=sizes['num_layers'],
    base_num_query_heads=sizes['num_heads'],
    base_num_kv_heads=sizes['num_heads'],
    head_dim=sizes['d_model'] // sizes['num_heads'],
    max_target_length=sizes['length'], per_device_batch_size=sizes['rows'],
  )  # fmt: skip

  def one_turn(state, *rest):
    asked.get()
    try:
      found = turn(state, *rest)
      sys.modules['jax'].block_until_ready(state['state'])
    except Exception as error:
      done.put(error)
      raise
    done.put(None)
    return found

  def whole():
    base = os.path.join(os.path.dirname(package.__file__), 'configs/base.yml')
    train.training_loop_iteration = one_turn
    with folder:
      try:
        train.main(['', base] + [f'{n}={value}' for n, value in given.items()])
      except BaseException as error:
        done.put(error)

  threading.Thread(target=whole, daemon=True).start()

  def run():
    asked.put(None)
    error = done.get()
    if error is not None:
      raise RuntimeError(why(error)) from error

  return run


def attention(peer, sizes):
  """-> () of causal attention and its gradients."""
  del peer
  (torch,) = load('torch')
  torch.manual_seed(0)
  shape = [sizes[name] for name in ('rows', 'heads', 'length', 'width')]
  dtype = getattr(torch, sizes.get('dtype', 'float32'))
  q, k, v = (
    torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)
  )
  weight = torch.randn(shape, dtype=dtype)

  def run():
    o = torch.nn.functional.scaled_dot_product_attention(
      q, k, v, is_causal=True
    )
    torch.autograd.grad((o * weight).sum(), (q, k, v))

  return run


def prefill(peer, sizes):
  """-> () of a prompt into a cache, and the logits of its last token."""
  del peer
  torch, model = llama(sizes)
  model.eval()
  tokens = torch.randint(0, sizes['vocab_size'], (1, sizes['length']))

  def run():
    with torch.inference_mode():
      model(input_ids=tokens, use_cache=True, logits_to_keep=1)

  return run


def decode(peer, sizes):
  """-> () of greedy tokens with a static cache.

  sizes['after']: only what comes after the first new token counts; the function
  then returns its seconds.
  """
  del peer
  torch, model = llama(sizes)
  model.eval()
  shape = sizes['rows'], sizes['before']
  tokens = torch.randint(0, sizes['vocab_size'], shape)
  seen = []

  def stamp(ids, scores, **kwargs):
    if not seen:
      seen.append(settled())
    return torch.zeros(len(ids), dtype=torch.bool)

  def run():
    seen.clear()
    made = model.generate(
      tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
      max_new_tokens=sizes['new'], cache_implementation='static',
      stopping_criteria=[stamp] if sizes['after'] else None,
    )  # fmt: skip
    if made.shape != (shape[0], shape[1] + sizes['new']):
      raise RuntimeError(f'generate made {tuple(made.shape)}')
    return settled() - seen[0] if sizes['after'] else None

  return run


def methods(peer, sizes):
  """-> () of greedy tokens after every prompt, one at a time.

  sizes: file, of the weights; prompts, lists of ids; new: tokens of each.
  """
  return (llama_cpp if peer == 'xllamacpp' else generate)(sizes)


def generate(sizes):
  """`methods` of transformers, whose weights are dequantised: float32."""
  torch, transformers = load('torch', 'transformers')
  folder, file = os.path.split(sizes['file'])
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=file, dtype=torch.float32, attn_implementation='sdpa'
  ).eval()
  model.generation_config.eos_token_id = None  # every text is as long
  model.generation_config.pad_token_id = 0

  def run():
    for prompt in sizes['prompts']:
      tokens = torch.tensor([prompt])
      made = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
        max_new_tokens=sizes['new'], cache_implementation='static',
      )  # fmt: skip
      if made.shape[1] != len(prompt) + sizes['new']:
        raise RuntimeError(f'generate made {tuple(made.shape)}')

  return run


def llama_cpp(sizes):
  """`methods` of llama.cpp, one thread: those that wait for work spin."""
  (llama,) = load('xllamacpp')
  about = llama.CommonParams()
  about.model.path, about.n_parallel, about.verbosity = sizes['file'], 1, 0
  about.n_ctx = max(map(len, sizes['prompts'])) + sizes['new']
  about.cpuparams.n_threads = about.cpuparams_batch.n_threads = 1
  server = llama.Server(about)

  def run():
    for prompt in sizes['prompts']:
      made = server.handle_completions(
        dict(
          prompt=prompt, n_predict=sizes['new'], temperature=0.0,
          ignore_eos=True, cache_prompt=False,
        )
      )  # fmt: skip
      made = json.loads(made) if isinstance(made, str) else made
      if (found := made['usage']['completion_tokens']) != sizes['new']:
        raise RuntimeError(f'llama.cpp made {found} tokens')

  return run


BENCHES = {
  'methods': methods,
  'step': step,
  'attention': attention,
  'prefill': prefill,
  'decode': decode,
}


def facts(bench):
  """Versions, threads and flags, in words."""
  if 'xllamacpp' in sys.modules:
    version = sys.modules['xllamacpp'].__version__
    return f'xllamacpp {version}, weights as its file has them, 1 thread'
  if 'maxtext' in sys.modules:
    jax, package = sys.modules['jax'], sys.modules['maxtext']
    found = [f'maxtext {package.__version__}', f'jax {jax.__version__}']
    return ', '.join([*found, f'Python {sys.version.split()[0]}'])
  torch = sys.modules['torch']
  found = [f'torch {torch.__version__}']
  if 'transformers' in sys.modules:
    found += [f'transformers {sys.modules["transformers"].__version__}, sdpa']
  if bench in ('decode', 'methods'):
    found += ['generate, static cache, not compiled']
  found += [
    f'Python {sys.version.split()[0]}',
    f'{torch.get_num_threads()} threads',
    f'OMP_WAIT_POLICY {os.environ.get("OMP_WAIT_POLICY", "not set")}',
    f'{torch.backends.cpu.get_cpu_capability()}',
  ]
  return ', '.join(found)


def why(error):
  """One line."""
  text = str(error).strip().partition('\n')[0]
  return f'{type(error).__name__}: {text}'[:200]


def main(argument):
  """Answers until its input ends."""
  # Libraries print too: what they write goes to the standard error.
  out = os.fdopen(os.dup(1), 'w', buffering=1, encoding='utf-8')
  os.dup2(2, 1)

  def say(**answer):
    out.write(json.dumps(answer) + '\n')

  job = json.loads(argument)
  bench, sizes = job['bench'], job['sizes']
  try:
    run = BENCHES[bench](job['peer'], sizes)
    run()  # what it imports, allocates and compiles is not timed
    say(notes=facts(bench))
  except RuntimeError as error:
    return say(skip=str(error).strip().partition('\n')[0][:200])
  except Exception as error:
    return say(skip=why(error))
  for line in sys.stdin:
    if line.strip() == 'run':
      before = settled()
      own = run() if bench == 'decode' else run() and None
      spent = settled() - before if own is None else own
      say(seconds=spent, peak=peak())


if __name__ == '__main__':
  folder = os.path.dirname(os.path.abspath(__file__))
  sys.path[:] = [p for p in sys.path if os.path.abspath(p or '.') != folder]
  main(sys.argv[1])
