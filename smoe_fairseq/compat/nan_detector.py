"""Lets fairseq look for the module where numbers stop being numbers.

For fairseq 0.12.2 on any torch. When a gradient is NaN it runs the batch again with hooks on every module,
backward ones of a kind that torch has deprecated: for an encoder, whose output is a dictionary of lists, they
end in StopIteration, and the reason is lost. Forward hooks find the module just as well, and the norms
of all gradients are logged in any case.
"""

from types import ModuleType


def hook_forward_only(nan_detector: ModuleType) -> None:
    detector = nan_detector.NanDetector

    def add_hooks(self, module):
        self.fhooks.append(module.register_forward_hook(self.fhook_fn))

    detector.add_hooks = add_hooks
