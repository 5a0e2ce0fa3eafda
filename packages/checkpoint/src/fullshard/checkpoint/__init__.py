"""Initialise, save and load a sharded model, on any mesh.

Owns weights as safetensors files, of which each rank reads its shards alone; initial values that no
mesh changes; and optimizer state as a state dict that does not depend on how a model is sharded: it
can be gathered, scattered and cut in another way. This package changes nothing in a training step.
"""

from fullshard.checkpoint.engines.links import LinkError, connect_engine
from fullshard.checkpoint.engines.metadata import ParamMeta
from fullshard.checkpoint.engines.slice_receiver import SliceReceiver
from fullshard.checkpoint.engines.slice_sender import SliceSender, SliceTransfer
from fullshard.checkpoint.engines.slices import Slice, tensor_parallel_slices
from fullshard.checkpoint.engines.source import ModelSource, weight_source
from fullshard.checkpoint.files.headers import WeightsError
from fullshard.checkpoint.initialise import InitFn, initialise
from fullshard.checkpoint.memory.checkpoints import MemoryCheckpoints
from fullshard.checkpoint.memory.errors import MemoryCheckpointError
from fullshard.checkpoint.memory.folder import MemoryRun, memory_runs
from fullshard.checkpoint.optim_state import (
    flatten_sharded_optim_state_dict,
    full_optim_state_dict,
    optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
)
from fullshard.checkpoint.options import (
    OptimStateKeyType,
    OptimStateKind,
    OptimStateOptions,
    optim_state_options,
    set_optim_state_options,
)
from fullshard.checkpoint.rules.rule import Rule
from fullshard.checkpoint.saving.async_save import PendingSave, async_save
from fullshard.checkpoint.saving.file_checksums import DamagedCheckpointError, check_checkpoint
from fullshard.checkpoint.saving.staging import snapshot
from fullshard.checkpoint.saving.writing import SaveError
from fullshard.checkpoint.streaming.stream import ParameterStream, iter_full
from fullshard.checkpoint.weights.load import LoadOptions, load_safetensors
from fullshard.checkpoint.weights.report import LoadReport, MismatchError, SaveReport
from fullshard.checkpoint.weights.save import SaveOptions, save_safetensors

__version__ = "0.1.0"

__all__ = [
    "DamagedCheckpointError",
    "InitFn",
    "LinkError",
    "LoadOptions",
    "LoadReport",
    "MemoryCheckpointError",
    "MemoryCheckpoints",
    "MemoryRun",
    "MismatchError",
    "ModelSource",
    "OptimStateKeyType",
    "OptimStateKind",
    "OptimStateOptions",
    "ParamMeta",
    "ParameterStream",
    "PendingSave",
    "Rule",
    "SaveError",
    "SaveOptions",
    "SaveReport",
    "Slice",
    "SliceReceiver",
    "SliceSender",
    "SliceTransfer",
    "WeightsError",
    "async_save",
    "check_checkpoint",
    "connect_engine",
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "initialise",
    "iter_full",
    "load_safetensors",
    "memory_runs",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "optim_state_options",
    "rekey_optim_state_dict",
    "save_safetensors",
    "scatter_full_optim_state_dict",
    "set_optim_state_options",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
    "snapshot",
    "tensor_parallel_slices",
    "weight_source",
]
