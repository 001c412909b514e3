"""Virtual token counters: how many tokens each tenant has had computed, so that the least served can go first."""

from __future__ import annotations

KEPT_IDLE = 1024
"""So many tenants without live requests keep their counters."""


class Tenants:
    """`served`: tokens by tenant; `live`: live requests by tenant.

    A tenant that comes back is lifted to the least served of those that have work: idling earns no credit (VTC).
    """

    __slots__ = ("live", "served")

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.served: dict[str, int] = {}

    def admitted(self, tenant: str) -> None:
        """A request of `tenant` became live."""
        if tenant not in self.live:
            floor = min([self.served[other] for other in self.live], default=0)
            self.served[tenant] = max(self.served.pop(tenant, 0), floor)
            self.live[tenant] = 0
        self.live[tenant] += 1

    def ended(self, tenant: str) -> None:
        """A request of `tenant` is live no more."""
        left = self.live[tenant] = self.live[tenant] - 1
        if not left:
            del self.live[tenant]
            if len(self.served) - len(self.live) > KEPT_IDLE:
                del self.served[next(name for name in self.served if name not in self.live)]

    def charge(self, tenant: str, tokens: int) -> None:
        """`tokens` were computed for `tenant`."""
        self.served[tenant] = self.served.get(tenant, 0) + tokens

    def copy(self) -> Tenants:
        """An independent copy."""
        other = Tenants()
        other.live, other.served = self.live.copy(), self.served.copy()
        return other
