"""The two programs of a judgement on code, each for a sandbox of its own: the tests (`judging`) and the code
(`contestant`). docs/sandbox.md explains them."""
