def test_it(http):
    r = http.get("/health")
    print(r.status_code, r.text)
    r = http.post("/v1/completions", json={"prompt": "def main(", "max_tokens": 8, "temperature": 0, "echo": True})
    print(r.status_code, r.text)
    r = http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0},
    )
    print(r.status_code, r.text)
    r = http.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    print(r.status_code, r.headers, r.text)
    r = http.post("/v1/chat/completions", json={"messages": []})
    print(r.status_code, r.text)
    r = http.post("/v1/chat/completions", content="{")
    print(r.status_code, r.text)
    for path in ("/v1/models", "/v1/models/tiny", "/v1/models/x", "/version", "/nope", "/live?frames=1"):
        r = http.get(path)
        print(path, r.status_code, r.text[:400])
    print(http.get("/metrics").text)
    print(http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).text)
    print(http.post("/detokenize", json={"tokens": [1, 2, 3]}).text)
    import json

    print(len(http.get("/openapi.json").text), list(http.get("/openapi.json").json()["paths"]))
