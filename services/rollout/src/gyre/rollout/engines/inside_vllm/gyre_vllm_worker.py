"""What OpenGyre adds to a vLLM worker: new weights from a file in place, and an early end of a transfer's lease.

    PYTHONPATH=THIS_FOLDER ... --worker-extension-cls gyre_vllm_worker.GyreWorker

This runs in vLLM's environment, not in ours: it imports nothing of OpenGyre. The folder holds nothing else, so that
putting it on the path hides no other module.
"""

import importlib
import os
from typing import Any

import torch
from safetensors import safe_open


def _slow_down_nixl(pause_us: int) -> None:
    """NIXL's thread polls without a pause, which takes a whole core of every server, also while nothing moves."""
    try:
        bindings = importlib.import_module("nixl._api").nixlBind
    except ImportError:
        return
    agent = bindings.nixlAgent

    def slower(name: str, config: Any) -> Any:
        config.pthrDelay = pause_us
        return agent(name, config)

    bindings.nixlAgent = slower


if "GYRE_NIXL_POLL_US" in os.environ:  # before the connector makes its agent
    _slow_down_nixl(int(os.environ["GYRE_NIXL_POLL_US"]))


def _repack(model: torch.nn.Module) -> int:
    """Packs again what a CPU packed but a reload passed by: the head that shares its weight with the embedding.

    Layers that keep no plain weight were loaded, and packed, by themselves.
    """
    stale = [m for m in model.modules() if hasattr(m, "cpu_linear") and getattr(m, "weight", None) is not None]
    stale = [module for module in stale if module.weight.numel() and hasattr(module, "quant_method")]
    for module in stale:
        module.quant_method.process_weights_after_loading(module)
    return len(stale)


class GyreWorker:
    """Mixed into vLLM's worker class; every method is called through `collective_rpc`, with texts as arguments."""

    def gyre_hello(self) -> dict:
        """Says that the extension is there."""
        return {"extension": 1, "model": type(self.model_runner.get_model()).__name__}

    def gyre_load_weights(self, path: str) -> dict:
        """Loads a safetensors file that holds the whole model under the names of its checkpoint.

        `reload_weights`, because `load_weights` alone does not undo what was done to the loaded weights (on a CPU they are
        repacked for its matrix kernels).
        """
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            self.model_runner.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in names))
        return {"tensors": len(names), "repacked": _repack(self.model_runner.get_model())}

    def gyre_release(self, *request_ids: str) -> dict:
        """Ends the leases on KV that waits to be pulled; `/pause` would wait for them. Unknown ids are ignored."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        worker = get_kv_transfer_group().connector_worker if has_kv_transfer_group() else None
        leases = getattr(worker, "_reqs_to_send", {})
        released = [request_id for request_id in request_ids if request_id in leases]
        leases.update(dict.fromkeys(released, 0.0))
        return {"released": len(released)}
