"""Chat with a server: answers come word by word, and each one joins the conversation.

    pip install openai
    raypp serve tiny --num-stages 2 --port 8000 &
    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python examples/chat_client.py

Type a message and press Enter; an empty one ends the chat. `tiny` has learned Python, not conversation.
"""

from openai import OpenAI

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
model = client.models.list().data[0].id
messages = []
while text := input("you: "):
    messages.append({"role": "user", "content": text})
    answer = ""
    print(f"{model}: ", end="")
    for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=64, stream=True):
        piece = chunk.choices[0].delta.content or ""
        print(piece, end="", flush=True)
        answer += piece
    print()
    messages.append({"role": "assistant", "content": answer})
