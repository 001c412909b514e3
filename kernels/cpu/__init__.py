"""The quantized path of CPUs: whole-number products whose bits no batch, thread or instruction set can change."""
