"""The Llama family on a CPU with 8-bit weights, 16-bit activations and 8-bit keys and values."""

from leftfold.executor.models.quantized.limits import unsupported, weight_bytes
from leftfold.executor.models.quantized.memory import QuantizedMemory
from leftfold.executor.models.quantized.model import QuantizedLlama, build

__all__ = ["QuantizedLlama", "QuantizedMemory", "build", "unsupported", "weight_bytes"]
