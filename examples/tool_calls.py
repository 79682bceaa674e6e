"""Let the model call a function: run it, tell the model what it returned, and show the answer.

    pip install openai
    raypp serve tiny --num-stages 2 --port 8000 &
    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python examples/tool_calls.py

`tiny` has not learned to call tools. `tool_choice="required"` forces a call whose arguments follow the schema; leave
it out with a model that decides by itself.
"""

import json

from openai import OpenAI


def get_weather(city: str, days: int) -> str:
    return f"{city}: sun for {days} days"


TOOL = {
    "name": "get_weather",
    "description": "Return the weather forecast of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Vienna", "Bern"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city", "days"],
    },
}
client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
request = {
    "model": client.models.list().data[0].id,
    "messages": [{"role": "user", "content": "Will the sun shine in Bern?"}],
    "tools": [{"type": "function", "function": TOOL}],
    "max_tokens": 100,
    "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
}
answer = client.chat.completions.create(**request, tool_choice="required").choices[0].message
request["messages"].append(answer)
for call in answer.tool_calls:
    result = get_weather(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) -> {result}")
    request["messages"].append({"role": "tool", "tool_call_id": call.id, "content": result})
print(client.chat.completions.create(**request, tool_choice="none").choices[0].message.content)
