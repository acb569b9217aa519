"""Chat templates with tools, in miniature: what each family writes round calls and results, and nothing else."""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

HERMES = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Write <tool_call>{"name": <name>, "arguments": <arguments>}</tool_call>.<|im_end|>\n{% endif %}'
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}"
    "{% if message.content %}\n{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    'Respond in the format {"name": function name, "parameters": its arguments}.\n'
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|eot_id|>{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ message.content }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}{{ '; ' if not loop.first }}"
    '{"name": {{ call.function.name | tojson }}, "parameters": {{ call.function.arguments | tojson }}}'
    "{% endfor %}{% else %}{{ message.content }}{% endif %}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def render(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    """As transformers renders it."""
    rendered, _ = render_jinja_template(conversations=[messages], chat_template=template, tools=tools)
    return str(rendered[0])


def said(template: str, message: dict[str, Any]) -> str:
    """What the policy would have drawn for this assistant message, its end of turn taken off."""
    ending = "<|im_end|>\n" if template == HERMES else "<|eot_id|>"
    opening = "<|im_start|>assistant" if template == HERMES else "<|start_header_id|>assistant<|end_header_id|>\n\n"
    return render(template, [message]).removeprefix(opening).removeprefix("\n").removesuffix(ending)
