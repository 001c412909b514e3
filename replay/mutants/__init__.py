"""How strong the fuzzer is: faults are planted one by one, and it is measured whether and how fast each is caught.

This module imports nothing, so that a trial can plant its fault before anything of the engine is imported.
"""
