"""Claims about pipelines: schedules simulated, steps equal, stages skipped.

Named by configs such as gpipe, megatron_turing, skippipe.

Read first: schedules.py, then step.py.
"""
