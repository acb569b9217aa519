"""Python code as the answer, and its tests as the reward: `scorer.CodeScorer`; docs/sandbox.md says how."""
