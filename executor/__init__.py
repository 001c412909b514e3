"""Executors apply plans: a torch model, the oracle, and what they share. Importing this imports no torch."""

import os

# An engine shares its cores with an HTTP process and with clients. OpenMP threads that spin at every barrier then
# wait for each other's time slices (measured: a tenth of the speed and less), so let them sleep. OpenMP reads this
# when it is loaded, hence here, before any executor imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
