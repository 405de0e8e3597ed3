"""What is said of weights of another program: their type, and what rounds them.

Files of 16 bits a number are computed in float32 unless a field says otherwise:
exact, and a CPU has nothing faster. On an accelerator that is twice the memory
and time that other programs take for the same files.
"""

ACCELERATORS = ('gpu', 'tpu')


def lines(files, config, platform):
  """[line] on the files that are to be read.

  Args:
    files: of models.huggingface. config: schema.Config that they run with.
    platform: of the devices, as jax calls it.
  """
  whole = config.decode.weights == 'loaded'
  if files.quantized and not whole:
    kinds = ', '.join(f'{n} ({x})' for n, x in sorted(files.quantized.items()))
    return [
      f'decode.weights=int4: matrices of layers, stored as {kinds} tensors, '
      'are rounded a second time, to nearest without minima; '
      'decode.weights=loaded leaves them as they are'
    ]
  wide = config.model.dtype == 'float32' and platform in ACCELERATORS
  if not (wide and whole and files.half):
    return []
  return [
    f'{files.path} is stored in {files.half} and computed in float32: '
    '--config.model.dtype=bfloat16 (lm-eval: dtype=bfloat16) halves memory and '
    'time, but for parameters while they are loaded or evaluated'
  ]
