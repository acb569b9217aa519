"""Code that a model wrote, run where it can do no harm: `sandbox.Sandbox` is the door, docs/sandbox.md the map."""
