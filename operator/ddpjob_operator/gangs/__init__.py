"""Gang schedulers and queues: an adapter each, a pure table. plan/gang.py has the rules that drive them."""

from __future__ import annotations

from ddpjob_operator.gangs import kueue, native
from ddpjob_operator.gangs.adapter import Adapter

ADAPTERS: dict[str, Adapter] = {adapter.name: adapter for adapter in (native.ADAPTER, kueue.ADAPTER)}
