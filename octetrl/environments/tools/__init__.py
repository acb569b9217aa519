"""Tools: Python functions with type annotations that a policy calls by name.

`tool` turns a function into a tool, and a `Toolbox` runs calls, also malformed ones (definition.py). messages.py finds
calls in a policy's message, and converts calls and results to the messages of chat templates.
"""
