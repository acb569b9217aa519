"""Code that a model wrote, run where it can do no harm: `sandbox.run_python` is the door, docs/sandbox.md the map."""
