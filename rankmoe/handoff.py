"""Joining two modules of a serving engine: the router that sees the logits and the runner that sees the activations.

The model stages the activations; the router consumes the request and runs the fused front on both; the runner takes
the result for the very same activations. Nothing is found unless everything matches, and whoever finds nothing runs
the separate passes, which give the same values.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import torch

from rankmoe.front import FrontResult, check_same_tokens, route_quantize
from rankmoe.types import LocalRange, RouterConfig, Routing


@dataclass(frozen=True)
class _Identity:
    """Which tensor this is: storage, place in it, shape, strides, dtype, and how often it was written in place."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Identity:
        return cls(
            storage=tensor.untyped_storage()._cdata,
            offset=int(tensor.storage_offset()),
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            dtype=tensor.dtype,
            # Inference tensors keep no version counter.
            version=0 if tensor.is_inference() else tensor._version,
        )


@dataclass
class _Pending:
    """What one thread has staged or published. Tensors are held, so that no storage can be reused meanwhile."""

    staged: tuple[torch.Tensor, _Identity, LocalRange] | None = None
    published: tuple[torch.Tensor, _Identity, FrontResult, _Identity] | None = None
    packed: tuple[torch.Tensor, _Identity, LocalRange | None] | None = None


@dataclass
class HandoffCounters:
    """How often a consumer found its result (hit) or had to run the separate passes (miss)."""

    route_hits: int = 0
    route_misses: int = 0
    take_hits: int = 0
    take_misses: int = 0


@dataclass
class Handoff:
    """One per model or stream, never a module global. Each thread sees only what it staged itself."""

    counters: HandoffCounters = field(default_factory=HandoffCounters)
    _threads: threading.local = field(default_factory=threading.local, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def stage(self, x: torch.Tensor, local_range: LocalRange | None = None) -> None:
        """Announce the activations of the layer about to be routed; replaces whatever was pending in this thread.

        x: [T, H] bfloat16 or float32. It is held until taken or cleared.
        local_range: this rank's experts, read by the caller at every forward. None or count 0 keeps ids global.
        Tensors made under ``torch.inference_mode`` have no version counter: writing one in place between staging and
        taking goes unseen, so don't.
        """
        self._threads.pending = _Pending(staged=(x, _Identity.of(x), local_range or LocalRange(0, 0)))

    def try_route(
        self,
        router_logits: torch.Tensor,
        config: RouterConfig,
        correction_bias: torch.Tensor | None = None,
        num_valid_tokens: torch.Tensor | None = None,
    ) -> Routing | None:
        """Route and quantise in one pass if activations are staged, and publish the result for ``take``.

        The request is consumed whatever happens. Returns the routing, or None where nothing is staged or the staged
        tensor has been written since: the caller then routes on its own.
        Raises ValueError where logits and staged activations hold different numbers of tokens: that is no miss but a
        caller's mistake.
        """
        pending, self._threads.pending = self._pending(), _Pending()
        if pending.staged is None or _Identity.of(pending.staged[0]) != pending.staged[1]:
            self._count("route_misses")
            return None
        x, identity, local_range = pending.staged
        check_same_tokens(router_logits, x)
        result = route_quantize(
            router_logits,
            x,
            config,
            correction_bias,
            local_range=local_range,
            num_valid_tokens=num_valid_tokens,
        )
        packed = result.routing.packed
        assert packed is not None, "the front always packs"
        packed_identity = _Identity.of(packed)
        self._threads.pending = _Pending(
            published=(x, identity, result, packed_identity),
            packed=(packed, packed_identity, result.routing.local_range),
        )
        self._count("route_hits")
        return result.routing

    def take(self, x: torch.Tensor) -> FrontResult | None:
        """The published result, once, for the same storage, shape, dtype and strides as were staged; else None.

        Where the published packed ids were written in place meanwhile, the result comes without its schedule.
        """
        published, pending = self._pending().published, self._pending()
        if published is None or _Identity.of(x) != published[1]:
            self._count("take_misses")
            return None
        pending.published = None
        self._count("take_hits")
        result, packed_identity = published[2], published[3]
        packed = result.routing.packed
        if packed is not None and _Identity.of(packed) != packed_identity:
            return replace(result, schedule=None, local_range=None)  # they are no longer those of the schedule
        return result

    def take_local_range(self, packed: torch.Tensor) -> LocalRange | None:
        """The range that this packed tensor was written for, once; None where its ids are global or it is unknown."""
        pending = self._pending()
        if pending.packed is None or _Identity.of(packed) != pending.packed[1]:
            return None
        local_range = pending.packed[2]
        pending.packed = None
        return local_range

    def clear(self) -> None:
        """Drop whatever is pending in this thread. Belongs in a ``finally`` around the layer."""
        self._threads.pending = _Pending()

    def __deepcopy__(self, memo: dict[int, object]) -> Handoff:
        """A new one with nothing pending: what is pending belongs to this one's tensors."""
        return Handoff()

    def __reduce__(self) -> tuple[type[Handoff], tuple[()]]:
        return Handoff, ()

    def _pending(self) -> _Pending:
        pending = getattr(self._threads, "pending", None)
        if pending is None:
            pending = self._threads.pending = _Pending()
        return pending

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self.counters, name, getattr(self.counters, name) + 1)
