"""Child processes with limits: callables, and programs in a sandbox. Start with `callable_process` and `sandbox`."""
