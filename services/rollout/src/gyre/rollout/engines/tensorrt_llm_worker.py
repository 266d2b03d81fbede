"""What runs inside TensorRT-LLM's own GPU workers: it mixes `Extension` of this module into them, by name.

The weights of a checkpoint are given to its stock `update_weights` in the form that takes handles, with handles that read
files: the loader shards, fuses and finalises them as it does for anybody. This process and the workers share no memory.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_BUCKET_BYTES = 2 << 30  # read at once, in host memory
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def __getattr__(name: str) -> type:
    """`Extension` exists once somebody asks for it, since its base does only where TensorRT-LLM is installed."""
    if name != "Extension":
        raise AttributeError(name)
    base = importlib.import_module("tensorrt_llm.llmapi.rlhf_utils").WorkerExtension
    uuid_of = importlib.import_module("tensorrt_llm._torch.utils").get_device_uuid
    return extension_of(base, _drained(), uuid_of)


def _drained() -> Callable[[Any], Any]:
    """The decorator that waits until the engine is idle; it has moved between releases."""
    try:
        return importlib.import_module("tensorrt_llm.executor.ray.utils").control_action_decorator
    except ImportError:
        return importlib.import_module("tensorrt_llm._ray_utils").control_action_decorator


def extension_of(base: type, drained: Callable[[Any], Any], uuid_of: Callable[[int], str]) -> type:
    """The class that is mixed in. `self.engine` is the executor and `self.device_id` the GPU, as the workers set them."""

    class Extension(base):  # type: ignore[misc, valid-type]
        """Called through `collective_rpc`."""

        @drained
        def gyre_idle(self) -> None:
            """Returns when nothing is in flight."""

        def gyre_update(self, directory: str) -> str:
            """Loads a Hugging Face checkpoint and returns the fingerprint of what is live then. Needs an idle engine."""
            device = uuid_of(self.device_id)
            for handles in buckets(Path(directory), _BUCKET_BYTES):
                self.update_weights({device: handles})
            self.update_weights(None)  # finalises, and resets the prefix cache
            return self.gyre_fingerprint()

        def gyre_fingerprint(self) -> str:
            """Of the parameters as they lie in memory."""
            return fingerprint(self.engine.model_engine.model)

        def gyre_reset_cache(self) -> None:
            """Forgets every reusable prefix."""
            self.engine.reset_prefix_cache()

        def gyre_free_bytes(self) -> int:
            """Free memory of this worker's device."""
            return torch.cuda.mem_get_info(self.device_id)[0] if torch.cuda.is_available() else 0

    return Extension


def buckets(directory: Path, max_bytes: int) -> Iterator[list[tuple[str, tuple[Any, tuple[Any, ...]]]]]:
    """Handles `(name, (function, arguments))` of all tensors, at most `max_bytes` at a time (or one larger tensor).

    The sixth argument is overwritten by the receiver with its device, as it does with a CUDA handle's.
    """
    bucket: list[tuple[str, tuple[Any, tuple[Any, ...]]]] = []
    size = 0
    for file in _files(directory):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
                num_bytes = _num_bytes(tensors.get_slice(name))
                if bucket and size + num_bytes > max_bytes:
                    yield bucket
                    bucket, size = [], 0
                bucket.append((name, (read_tensor, (str(file), name, None, None, None, None, None))))
                size += num_bytes
    if bucket:
        yield bucket


def read_tensor(file: str, name: str, *_: Any) -> torch.Tensor:
    """A tensor on the CPU, where the loader expects those of a checkpoint."""
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def fingerprint(model: torch.nn.Module) -> str:
    """64 bits over names and raw values, summed on the device: it notices what a half load or a lost page changes."""
    total = 0
    for name, parameter in model.named_parameters():
        raw = parameter.detach().contiguous().view(-1).view(_VIEWS[parameter.element_size()])
        value = int(raw.sum(dtype=torch.int64))
        total = (total * 1_000_003 + value * (zlib.crc32(name.encode()) | 1)) % 2**64
    return f"{total:016x}"


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return [directory / "model.safetensors"]
    return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _num_bytes(part: Any) -> int:
    sizes = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
    count = 1
    for length in part.get_shape():
        count *= length
    return count * sizes.get(part.get_dtype(), 1)
