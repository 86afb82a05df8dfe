"""Shared memory between Headway's processes: blocks, the version ledger and its gate, queues, weight slots."""
