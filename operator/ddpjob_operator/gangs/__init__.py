"""Gang schedulers and queues. Each has an adapter, which is a pure table; plan/gang.py has the rules that use it."""

from __future__ import annotations

from ddpjob_operator.gangs import kueue, native
from ddpjob_operator.gangs.adapter import Adapter

ADAPTERS: dict[str, Adapter] = {adapter.name: adapter for adapter in (native.ADAPTER, kueue.ADAPTER)}
