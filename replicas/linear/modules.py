"""The linear modules of a transformers model, whatever their format. Embeddings are included: their outputs are the table's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, Parameter
from transformers.pytorch_utils import Conv1D

from replicas.linear.dense import Dense
from replicas.linear.method import LinearMethod, StoredTensor

DENSE, DENSE_TRANSPOSED = Dense(), Dense(is_transposed=True)


class StoredLinear(Module):
    """A linear whose parameters are the tensors of its format."""

    bias: Tensor | None

    def __init__(self, method: LinearMethod, plain: Linear | Conv1D) -> None:
        """Replaces `plain`, with its bias and on its device. The tensors of the format are empty until they are loaded."""
        super().__init__()
        self.method = method
        self.out_features, self.in_features = features(plain)
        for tensor in formatted(self):
            shape = (0,) if tensor.shape is None else tensor.shape
            empty = torch.empty(shape, dtype=tensor.dtype or plain.weight.dtype, device=plain.weight.device)
            self.register_parameter(tensor.key, Parameter(empty, requires_grad=False))
        self.register_parameter("bias", plain.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.run(x, stored_tensors(self), self.bias)


def method_of(module: Module) -> LinearMethod:
    if isinstance(module, StoredLinear):
        return module.method
    return DENSE_TRANSPOSED if isinstance(module, Conv1D) else DENSE


def features(module: Module) -> tuple[int, int]:
    """Outputs and inputs of a linear; rows and width of an embedding."""
    if isinstance(module, StoredLinear):
        return module.out_features, module.in_features
    first, second = module.weight.shape  # type: ignore[misc]
    return (int(second), int(first)) if isinstance(module, Conv1D) else (int(first), int(second))


def resize(module: Module, num_outputs: int, num_inputs: int) -> None:
    """Sets a module's sizes after its tensors were cut to a rank's part."""
    if isinstance(module, Conv1D):
        module.nf, module.nx = num_outputs, num_inputs
    elif isinstance(module, Embedding):
        module.num_embeddings = num_outputs
    elif isinstance(module, Linear | StoredLinear):
        module.out_features, module.in_features = num_outputs, num_inputs


def formatted(module: Module) -> tuple[StoredTensor, ...]:
    """The tensors that hold the module's weights, without the bias."""
    return method_of(module).tensors(*features(module))


def stored_tensors(module: Module) -> dict[str, Tensor]:
    """The values of the `formatted` tensors, by name."""
    return {tensor.name: module.get_parameter(tensor.key).detach() for tensor in formatted(module)}


def joined_bias(modules: Sequence[Module]) -> Tensor | None:
    """The biases of all modules in order, float32 [N], zeros where a module has none; None when no module has one."""
    biases: list[Tensor | None] = [getattr(module, "bias", None) for module in modules]
    if all(bias is None for bias in biases):
        return None
    zeros = [torch.zeros(features(module)[0], dtype=torch.float32) for module in modules]
    return torch.cat([zero if bias is None else bias.detach().float() for zero, bias in zip(zeros, biases, strict=True)])


def free(module: Module) -> None:
    """Drops the weights after they were packed. A tied table stays with its other module."""
    for tensor in formatted(module):
        module.register_parameter(tensor.key, None)
