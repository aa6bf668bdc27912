"""Lets the real SGLang run on a CPU. Python imports this file at start-up from the engine's site-packages.

Two things, both outside SGLang's own files, which stay as the wheel has them:

- Packages that need a GPU are imported as *stand-ins*: their names exist, calling one of them raises.
- A few functions get a CPU path once their module is loaded (``ADJUSTMENTS``), each with its reason.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import types

STAND_INS = frozenset(
    {
        "cuda",
        "cutlass",
        "intel_extension_for_pytorch",
        "sgl_kernel",
        "soundfile",
        "torchao",
        "torchvision",
        "triton",
        "vllm",
    }
)
# SGLang asks for these two to learn whether vLLM is there at all: it is not.
ABSENT = ("vllm.logger", "vllm.distributed")
# The wheel of 0.4.10 lacks a .cpp file that this module compiles on import.
REPLACED = ("sglang.srt.mem_cache.storage.hf3fs",)
# Their decorators run at import; their kernels are never launched here.
DECORATING = ("cuda", "cutlass", "triton")


class Kernel:
    """What ``@triton.jit`` makes of a function: it can be named and passed on, not launched."""

    arg_names = ()

    def __init__(self, function):
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid):
        raise RuntimeError(f"a CPU engine cannot launch the Triton kernel {self.__name__}")


class StandInType(type):
    """The class of stand-in names: any attribute of one is another, so that class bodies and types work."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{cls.__name__}.{name}")

    def __instancecheck__(cls, value):
        return cls.__name__.endswith("JITFunction") and callable(value)


def stand_in(name):
    """A class named ``name`` that serves as a decorator where ``DECORATING`` says so, and else refuses."""

    def call(cls, *args, **kwargs):
        if name.split(".")[0] not in DECORATING:
            raise RuntimeError(f"a CPU engine cannot call {name}")
        decorate = Kernel if name.startswith("triton.jit") else keep
        bare = len(args) == 1 and callable(args[0]) and not kwargs
        return decorate(args[0]) if bare else decorate

    return StandInType(name, (), {"__new__": call, "__module__": __name__})


def keep(function=None, *_args, **_kwargs):
    return function


class StandInModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.from_sglang(name)
        if value is None:
            value = stand_in(f"{self.__name__}.{name}")
            setattr(self, name, value)
        return value

    def from_sglang(self, name):
        """Old releases take RMSNorm and SiluAndMul from vLLM where theirs have CPU code of the same name."""
        if not self.__name__.startswith("vllm."):
            return None
        own = sys.modules.get("sglang.srt.layers." + self.__name__.rpartition(".")[2])
        return getattr(own, name, None)


class StandInLoader(importlib.abc.Loader):
    def create_module(self, spec):
        module = StandInModule(spec.name)
        module.__path__ = []
        module.__version__ = "3.5.0"
        if spec.name == "intel_extension_for_pytorch":  # up to 0.4.8 sums over CPU ranks go through it
            module.distributed = importlib.import_module("torch.distributed")
        if spec.name == "triton":  # plain arithmetic that runs on the host
            module.cdiv = lambda a, b: -(-a // b)
            module.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()
        return module

    def exec_module(self, module):
        pass


class StandInFinder(importlib.abc.MetaPathFinder):
    """Last in line: gives a stand-in for what the environment does not have."""

    def find_spec(self, name, path=None, target=None):
        # importlib.util.find_spec asks whether a package is installed: the true answer is no.
        probed = sys._getframe(2).f_code.co_name == "find_spec"
        if probed or name.split(".")[0] not in STAND_INS or name.startswith(ABSENT):
            return None
        return importlib.machinery.ModuleSpec(name, StandInLoader(), is_package=True)


class ReplacingFinder(importlib.abc.MetaPathFinder):
    """First in line: stands in for modules that exist but cannot load, and adjusts those that need it."""

    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if name.startswith(REPLACED) or (top == "triton" and os.environ.get("CPU_ENGINE_HIDE_TRITON")):
            return importlib.machinery.ModuleSpec(name, StandInLoader(), is_package=True)
        if name not in ADJUSTMENTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = AdjustingLoader(spec.loader, ADJUSTMENTS[name])
        return spec


class AdjustingLoader(importlib.abc.Loader):
    def __init__(self, loader, adjust):
        self.loader, self.adjust = loader, adjust

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        self.adjust(module)

    def __getattr__(self, name):
        return getattr(self.loader, name)


def attend_with_absorbed_weights(module):
    """The torch_native backend has no ragged prefill: use the path that every backend has."""
    method = module.AttnForwardMethod.MLA
    module.DeepseekV2AttentionMLA.dispatch_attn_forward_method = lambda self, forward_batch: method


def allow_latent_attention(module):
    """Up to 0.5.5 the runner refuses latent attention on a CPU without AMX, though torch_native serves it."""
    adjust = getattr(module.ModelRunner, "model_specific_adjustment", None)
    if adjust is None or "not supported on CPU" not in inspect.getsource(adjust):
        return

    def adjust_as_if_on_a_gpu(self):
        arguments = self.server_args
        device = arguments.device
        arguments.device, arguments.attention_backend = "cuda", "triton"
        try:
            adjust(self)
        finally:
            arguments.device, arguments.attention_backend = device, "torch_native"

    module.ModelRunner.model_specific_adjustment = adjust_as_if_on_a_gpu


def run_experts_in_python(module):
    """0.4.6 has no CPU path for unquantised experts, only the reference function that this calls."""
    method = module.UnquantizedFusedMoEMethod
    if method.forward_native is not method.forward_cuda:
        return

    def forward(
        self,
        layer,
        x,
        use_grouped_topk,
        top_k,
        router_logits,
        renormalize,
        topk_group=None,
        num_expert_group=None,
        custom_routing_function=None,
        correction_bias=None,
        **options,
    ):
        return module.moe_forward_native(
            layer,
            x,
            use_grouped_topk,
            top_k,
            router_logits,
            renormalize,
            topk_group,
            num_expert_group,
            custom_routing_function,
            correction_bias,
            routed_scaling_factor=options.get("routed_scaling_factor"),
        )

    method.forward_native = forward


def normalise_in_place(module):
    """The CUDA kernel behind ``norm(x, residual)`` overwrites both tensors. Do the same here.

    Otherwise code that keeps a reference where it needs a copy would be wrong on a GPU alone.
    """
    native = module.RMSNorm.forward_native

    def forward_native(self, x, residual=None, *args, **kwargs):
        result = native(self, x, residual, *args, **kwargs)
        if residual is None or not isinstance(result, tuple):
            return result
        normed, total = result
        if normed.shape == x.shape and normed.dtype == x.dtype:
            x.copy_(normed)
            residual.copy_(total)
            return x, residual
        return result

    module.RMSNorm.forward_native = forward_native
    if DEFER_ALL_REDUCE:
        module.RMSNorm.forward_with_allreduce_fusion = sum_then_normalise


def sum_then_normalise(self, x, residual=None, *args, **kwargs):
    """What the fused kernel of a Hopper GPU does in one step."""
    communication = sys.modules["sglang.srt.distributed.communication_op"]
    return self.forward(communication.tensor_model_parallel_all_reduce(x), residual, *args, **kwargs)


def gather_on_the_host(module):
    """Up to 0.4.6 this needs an operator of CUDA, up to 0.5.0 it joins ranks along the wrong dimension."""
    group = module.GroupCoordinator
    as_released = group.all_gather

    def all_gather(self, input_, dim=-1, *args, **kwargs):
        if self.world_size == 1 or args or kwargs:
            return as_released(self, input_, dim, *args, **kwargs)
        torch = sys.modules["torch"]
        parts = [torch.empty_like(input_) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, input_.contiguous(), group=self.device_group)
        return torch.cat(parts, dim)

    group.all_gather = all_gather


def defer_all_reduce(module):
    """Leave a layer's last sum over the ranks to the next layer, as SGLang does with fused kernels."""
    if DEFER_ALL_REDUCE:
        module.apply_flashinfer_allreduce_fusion = lambda batch_size: batch_size > 0


def answer_for_amx(module):
    """Up to 0.4.10 SGLang asks torch through a private name that later versions dropped."""
    cpu = module._C._cpu
    if not hasattr(cpu, "_is_amx_tile_supported"):
        cpu._is_amx_tile_supported = lambda: False


def claim_torchvision(module):
    """Transformers 5 loads its image classes, which no test uses, only beside torchvision."""
    available = module._is_package_available
    if module.__dict__.get("_torchvision_available") is not None:
        return

    def claim(package, *args, **kwargs):
        return (True, "0.26.0") if package == "torchvision" else available(package, *args, **kwargs)

    module._is_package_available = claim


DEFER_ALL_REDUCE = bool(os.environ.get("CPU_ENGINE_DEFER_ALL_REDUCE"))

ADJUSTMENTS = {
    "torch": answer_for_amx,
    "transformers.utils.import_utils": claim_torchvision,
    "sglang.srt.distributed.parallel_state": gather_on_the_host,
    "sglang.srt.layers.communicator": defer_all_reduce,
    "sglang.srt.layers.layernorm": normalise_in_place,
    "sglang.srt.layers.moe.fused_moe_triton.layer": run_experts_in_python,
    "sglang.srt.model_executor.model_runner": allow_latent_attention,
    "sglang.srt.models.deepseek_v2": attend_with_absorbed_weights,
}

sys.meta_path.insert(0, ReplacingFinder())
sys.meta_path.append(StandInFinder())
