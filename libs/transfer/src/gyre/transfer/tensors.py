"""torch state dicts as registered arrays and back. Import this module only where torch is installed.

bfloat16 has no numpy dtype: it travels as its 16-bit patterns (uint16), which no policy parameter uses otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch


def arrays_of(state: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """CPU views of `state`'s tensors (copies where they are elsewhere or not contiguous)."""
    arrays = {}
    for name, tensor in state.items():
        host = tensor.detach().cpu().contiguous()
        arrays[name] = (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()
    return arrays


def tensors_of(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Tensors over the arrays' memory."""
    tensors = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(array)
        tensors[name] = tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
    return tensors
