"""The model is never in memory during an import or an export."""

from __future__ import annotations

import json

from tests.support.forked import run_script

_MIB = 1 << 20

_CHILD = """
import json, sys
import torch
import transformers  # Both ways ask whether the model is one of its models.
from infinity.checkpoint import export_safetensors, weight_source
from tests.support.memory import growth_nbytes

def read(name):
    return torch.full(model.get_parameter(name).shape, 1.0)

def write(name, tensor):
    assert tensor[0, 0] == 1.0

with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 2048, bias=False) for _ in range(32)))
directory = sys.argv[1]
isinstance(model, transformers.PreTrainedModel)
limit = 96 << 20
growth = {
    "export": growth_nbytes(
        lambda: export_safetensors(model, directory, max_shard_nbytes=limit, read=read)
    ),
    "import": growth_nbytes(lambda: weight_source(directory).plan(model).load(write)),
}
print(json.dumps(growth))
"""


def test_import_and_export_hold_one_tensor_of_many(tmp_path):
    """256 MiB in tensors of 8 MiB: resident memory grows by a few of them.

    A tensor that is read, one in the making, and those that the allocator has not given back (five
    in all were seen), when nothing that was freed before is there to be taken again.
    """
    done = run_script(_CHILD, tmp_path)
    assert done.returncode == 0, done.stderr
    growth = json.loads(done.stdout)

    assert len(list(tmp_path.glob("model-*.safetensors"))) == 3
    assert growth["export"] < 64 * _MIB, growth
    assert growth["import"] < 64 * _MIB, growth
