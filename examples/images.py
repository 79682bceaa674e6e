"""Ask a model about an image.

    python examples/images.py

`tiny-vl` comes with the package and knows coloured shapes. An image is a PIL image, a path, bytes or an array; over
HTTP it is an `image_url` part, as in OpenAI's API.
"""

from PIL import Image, ImageDraw

from raypp import LLM, SamplingParams

if __name__ == "__main__":
    image = Image.new("RGB", (96, 96), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((8, 8, 40, 40), fill="red")
    draw.rectangle((52, 52, 84, 84), fill="blue")

    question = {"type": "text", "text": "What is in the picture?"}
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, question]}]
    with LLM("tiny-vl", num_stages=2) as llm:
        [output] = llm.chat(messages, SamplingParams(max_tokens=32, temperature=0.0))
    print(output.outputs[0].text)
