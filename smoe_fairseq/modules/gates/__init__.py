"""The gates.

A gate is called with tokens, a mask and its `extra_input`, if it has one; it returns a `Routing`. Its class
says what it is (see `Gate`). To add one, add a file with its `decide`, and a line below; outside of this
package, decorate the class by ``@register_gate("name")``.
"""

from smoe_fairseq.modules.gates.base import BaseGate
from smoe_fairseq.modules.gates.depths import DepthsGate
from smoe_fairseq.modules.gates.expert_choice import ExpertChoiceGate
from smoe_fairseq.modules.gates.hashed import HashGate, HashTopKGate
from smoe_fairseq.modules.gates.relu import ReLUGate
from smoe_fairseq.modules.gates.threshold import ThresholdGate
from smoe_fairseq.modules.gates.top_k import TopKGate
from smoe_fairseq.modules.gates.top_p import TopPGate
from smoe_fairseq.modules.registry import GATES, register_gate

for _name, _kind in {
    "topk": TopKGate,
    "hash": HashGate,
    "hash-topk": HashTopKGate,
    "base": BaseGate,
    "expert-choice": ExpertChoiceGate,
    "top-p": TopPGate,
    "relu": ReLUGate,
    "threshold": ThresholdGate,
    "depths": DepthsGate,
}.items():
    register_gate(_name)(_kind)

__all__ = ["GATES", "register_gate"]
