"""Lets ``--bf16`` train on the GPU or the CPU.

For fairseq 0.12.2 on any Python. Its command line takes ``--bf16`` as a request for a TPU and stops
with "'NoneType' object has no attribute 'xla_device'" where torch_xla is not installed. Here
``--bf16`` asks for a TPU only where torch_xla is installed, or where the user wrote ``--tpu``.
"""

import functools
import sys
from types import ModuleType


def keep_bf16_off_tpu(options: ModuleType) -> None:
    original = options.parse_args_and_arch

    @functools.wraps(original)
    def parse_args_and_arch(parser, input_args=None, *others, **options_):
        parsed = original(parser, input_args, *others, **options_)
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        words = sys.argv[1:] if input_args is None else input_args
        if getattr(args, "bf16", False) and options.utils.xm is None and "--tpu" not in words:
            args.tpu = False
        return parsed

    options.parse_args_and_arch = parse_args_and_arch
