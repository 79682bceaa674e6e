"""Stream several texts at once: `AsyncLLM` yields a request's text so far whenever it has new tokens.

    python examples/streaming.py

The engine runs all requests together, so their lines mix.
"""

import asyncio

from raypp import AsyncLLM, SamplingParams

PARAMS = SamplingParams(max_tokens=16, temperature=0.0)


async def stream(llm: AsyncLLM, prompt: str) -> None:
    num_shown = 0
    async for output in llm.generate(prompt, PARAMS):
        text = output.outputs[0].text
        print(f"{prompt!r}: {text[num_shown:]!r}")
        num_shown = len(text)
    print(f"{prompt!r} ends: {output.outputs[0].finish_reason}")


async def main() -> None:
    async with await AsyncLLM.create("tiny", num_stages=2) as llm:
        await asyncio.gather(*(stream(llm, prompt) for prompt in ("def main(", "import ", "class ")))


if __name__ == "__main__":
    asyncio.run(main())
