"""Hold an engine in a Ray actor of your own, and use it from every process of the cluster.

    python examples/own_actor.py

The engine's stages are Ray actors beside this one. They end with it.
"""

import ray

from raypp import AsyncLLM, SamplingParams


@ray.remote(num_cpus=0.1)  # of this actor; the stages ask for their own
class Writer:
    """An async actor: calls that wait for the engine overlap, and it runs their requests together."""

    async def start(self) -> None:
        self.llm = await AsyncLLM.create("tiny", num_stages=2)

    async def complete(self, prompt: str) -> str:
        [output] = await self.llm.complete([prompt], SamplingParams(max_tokens=16, temperature=0.0))
        return output.outputs[0].text

    async def close(self) -> None:
        await self.llm.close()


if __name__ == "__main__":
    writer = Writer.remote()
    ray.get(writer.start.remote())
    prompts = [f"def function_{i}(" for i in range(8)]
    for prompt, text in zip(prompts, ray.get([writer.complete.remote(prompt) for prompt in prompts]), strict=True):
        print(repr(prompt), "->", repr(text))
    ray.get(writer.close.remote())
    ray.kill(writer)
