"""Print the schemas of the tools of MCP servers, which are asked for over their standard input. See `make.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

modules = Path(sys.argv[1])
# What a server wants to see before it tells its tools; none of it is used.
nothing = {
    "GITHUB_PERSONAL_ACCESS_TOKEN": "none",
    "GITLAB_PERSONAL_ACCESS_TOKEN": "none",
    "SLACK_BOT_TOKEN": "none",
    "SLACK_TEAM_ID": "none",
}
servers = {
    path.name: ["node", str(path / "dist/index.js"), *(["/tmp"] if path.name == "server-filesystem" else [])]
    for path in sorted((modules / "@modelcontextprotocol").glob("server-*"))
}
servers |= {f"mcp_server_{name}": [sys.executable, "-m", f"mcp_server_{name}"] for name in ("fetch", "git", "time")}

for name, command in servers.items():
    environment = {**os.environ, **nothing}
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "corpus", "version": "1"}}
    for message in (
        {"id": 1, "method": "initialize", "params": client},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/list", "params": {}},
    ):
        server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        server.stdin.flush()
    try:
        for line in server.stdout:
            answer = json.loads(line)
            if answer.get("id") == 2:
                for tool in answer["result"]["tools"]:
                    for key in ("inputSchema", "outputSchema"):
                        if tool.get(key):
                            entry = {"source": "mcp", "name": f"{name}: {tool['name']} {key}", "schema": tool[key]}
                            print(json.dumps(entry))
                break
    finally:
        server.kill()
        server.wait()
