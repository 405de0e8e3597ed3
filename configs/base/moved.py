"""Old names of modules, from before folders had rooms: alive for one release.

`from paraxis.sharding import context` imports
paraxis.sharding.sequence.attention and warns (DeprecationWarning) with the new
name; so does an attribute of a module whose name a room took, such as
paraxis.train.plot.draw. Only this form of import is kept.
"""

import importlib
import importlib.util
import warnings

# Room -> the modules that moved there; old=new where the name changed, with the
# folder where that did, too.
ROOMS = {
  'configs.base': (
    'errors declare=field model_schema=model mixer_schema=mixers command_line'
  ),
  'pallas_kernels.attention': (
    'attention=op attention_blocks=blocks attention_xla=xla '
    'attention_tpu=tpu attention_gpu=gpu attention_adapters=adapters '
    'block_table'
  ),
  'pallas_kernels.decode_attention': (
    'decode_attention=op decode_attention_tpu=tpu '
    'decode_attention_gpu=gpu decode_schedule=schedule'
  ),
  'pallas_kernels.scans': (
    'gated_scan=gated gated_scan_tpu=gated_tpu gated_scan_gpu=gated_gpu '
    'gated_scan_xla=gated_xla gated_chunk linear_scan=linear '
    'linear_scan_tpu=linear_tpu linear_scan_gpu=linear_gpu '
    'linear_scan_selective=selective newton_scan=newton '
    'affine_scan=affine causal_conv'
  ),
  'pallas_kernels.matmul': (
    'quantized_matmul=quantized quantized_matmul_tpu=quantized_tpu '
    'grouped_matmul=grouped cross_entropy'
  ),
  'sharding.tensor': (
    'tensor=rings project product_layouts lookup vocabulary tape narrow'
  ),
  'sharding.sequence': (
    'context=attention context_forms=forms context_order=order scan'
  ),
  'sharding.experts': 'expert=dispatch expert_product=product',
  'sharding.pipeline': (
    'pipeline=executor pipeline_ticks=ticks pipeline_phases=phases '
    'schedules schedule_tables=tables schedule_paths=paths '
    'schedule_check=checks uniform residuals'
  ),
  'sharding.checkpoint': 'store manifest fingerprint saved_arrays',
  'sharding.meter': (
    'hlo compiled traced predict liveness flops roofline traffic aot target '
    'train.compiling=compiling'
  ),
  'sharding.planner': 'simulate auto_rules layout=conversions signatures',
  'train.steps': 'pipeline_step',
  'models.mixers': (
    'attention latent_attention=latent latent_rotation gated_linear mamba '
    'recurrent recurrence tcn mixer=protocol rope'
  ),
  'models.ffn': 'moe router mlp',
  'models.text': 'tokenizer',
  'models': 'model_checks=checks',
  'train.data': (
    'data=batches packing corpus token_cache fetch package_index '
    'archive_texts baselines batch_ramp'
  ),
  'train.run': 'workdir hosts stop metrics evaluate',
  'train.certify': (
    'trial verify properties shrink check target_compile doctor pipeline_report'
  ),
  'train.bench': (
    'bench=command bench_context=attention bench_data=data '
    'bench_decode=decode bench_kernels=kernels bench_measure=measure '
    'bench_pipeline=pipeline bench_reference=reference '
    'bench_startup=startup bench_train=train kernel_device kernel_matrix '
    'kernel_schedules kernel_tune'
  ),
  'train.plot': (
    'plot=losses plot_command=command plot_experts=experts '
    'draw_schedule=schedule draw_layout=layout'
  ),
  'train.claims': 'papers claims=harness claims_families=families',
  'train.claims.layouts': (
    'claims_layouts=step claims_layout=conversions claims_memory=memory '
    'claims_tensor=tensor claims_context=context '
    'claims_auto_rules=auto_rules claims_check=check '
    'claims_vocabulary=vocabulary'
  ),
  'train.claims.pipeline': (
    'claims_pipeline=schedules claims_pipeline_step=step claims_skip=skip'
  ),
  'train.claims.experts': (
    'claims_experts=layer claims_expert_loads=loads '
    'claims_expert_messages=messages claims_expert_training=training'
  ),
  'train.claims.attention': (
    'claims_attention=kernels claims_attention_parts=parts '
    'claims_latent=latent claims_decode_attention=decode'
  ),
  'train.claims.scans': (
    'claims_scans=sharded claims_hybrid=hybrid claims_tcn=tcn '
    'claims_recall=recall'
  ),
  'train.claims.decode': 'claims_quantized=quantized',
  'train.updates': 'optimizers',
  'train': 'job=program',
}


def table():
  """{old dotted name: new one}, both without 'paraxis.'."""
  out = {}
  for room, names in ROOMS.items():
    for name in names.split():
      old, _, new = name.partition('=')
      folder = '' if '.' in old else f'{room.split(".")[0]}.'
      out[f'{folder}{old}'] = f'{room}.{new or old}'
  return out


def _warn(old, new):
  warnings.warn(
    f'{old} is now {new}; the old name goes with the next release',
    DeprecationWarning,
    stacklevel=3,
  )


def names_of(package):
  """A package's __getattr__ (PEP 562), which knows its modules' old names."""
  folder = package.removeprefix('paraxis.')

  def find(name):
    missing = AttributeError(f'module {package!r} has no attribute {name!r}')
    if name.startswith('__') or importlib.util.find_spec(f'{package}.{name}'):
      raise missing  # a module that the import system is about to import
    new = table().get(f'{folder}.{name}')
    if new is not None:
      _warn(f'{package}.{name}', f'paraxis.{new}')
      return importlib.import_module(f'paraxis.{new}')
    own = table().get(folder)  # the module whose name this room took
    if own is not None:
      module = importlib.import_module(f'paraxis.{own}')
      if hasattr(module, name):
        _warn(f'{package}.{name}', f'{module.__name__}.{name}')
        return getattr(module, name)
    raise missing

  return find
