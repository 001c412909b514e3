"""The Llama family on a CPU with weights of 8 or 4 bits, 16-bit activations and 8-bit keys and values."""

from leftfold.executor.models.quantized.limits import BITS, unsupported, weight_bytes
from leftfold.executor.models.quantized.memory import QuantizedMemory
from leftfold.executor.models.quantized.model import QuantizedLlama, build

__all__ = ["BITS", "QuantizedLlama", "QuantizedMemory", "build", "unsupported", "weight_bytes"]
